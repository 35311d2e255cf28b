"""Linear models on sparse and unscaled data, against what people use today. `python -m vsgd_bench.sparse`."""
