#!/bin/sh
# The reward is the share of ASCII letters in the answer.
python3 -c "
import os
text = open(os.environ['APP'] + '/answer.txt').read()
letters = sum(c.isascii() and c.isalpha() for c in text)
print(letters / max(len(text), 1))
" > "$LOGS/verifier/reward.txt"
