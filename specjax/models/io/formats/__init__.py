"""The formats of drafter heads, one file a kind; `specjax.models.io.head_files` reads them."""
