"""swath collects experience for reinforcement learning in PyTorch."""
