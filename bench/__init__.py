"""Speed of swath beside its peers, on the same envs and policies: ``python -m bench``."""
