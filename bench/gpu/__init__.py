"""Speed on a GPU; `python -m bench.gpu`."""
