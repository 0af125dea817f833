"""Parts of ``scripts/merge.py``: proof that the merged model plays like the adapter, and publishing it."""
