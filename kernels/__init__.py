"""What is computed: tensors in, tensors out. Each operation has a folder; `reference.py` in it is the definition."""
from .attention import dense_attention, sparse_residual, token_sparse_attention
from .cells import cell_order, keep_only
from .grouping import group_queries
from .pooling import pool_cells
from .registry import BackendUnavailable, backend_names, pick, why_no_precision, why_none
from .residual import FORMATS, Residual, auto_residual, compress_residual, retained_energy
from .selection import expand_selection, pack_bits, select_keys, unpack_bits, unselected_counts
from .shapes import CellOrder, Geometry, KeySelection, PooledTail, QueryGroups, key_budget

__all__ = [
    "FORMATS", "BackendUnavailable", "CellOrder", "Geometry", "KeySelection", "PooledTail", "QueryGroups", "Residual",
    "auto_residual", "backend_names", "cell_order", "compress_residual", "dense_attention", "expand_selection", "group_queries",
    "keep_only", "key_budget", "pack_bits", "pick", "pool_cells", "retained_energy", "select_keys", "sparse_residual",
    "token_sparse_attention", "unpack_bits", "unselected_counts", "why_no_precision", "why_none",
]
