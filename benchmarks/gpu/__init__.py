"""Ten minutes on a GPU: ``bash benchmarks/gpu/run.sh``. README.md beside this file is the map."""
