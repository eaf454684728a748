"""What one GPU makes of specjax: `python -m specjax.bench.gpu --out DIR`."""
