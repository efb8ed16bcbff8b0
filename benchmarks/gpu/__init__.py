"""One command for one run on a GPU: `python -m benchmarks.gpu --minutes 8 --out FOLDER`."""
