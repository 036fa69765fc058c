"""What the right answer is: one plain-torch function per op. Slow, short, differentiable."""
