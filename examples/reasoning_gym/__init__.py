"""A task of reasoning-gym, judged by its own checker, on SmolLM2-135M-Instruct."""
