"""One sampling run as the attention override sees it: host calls in, decisions of `mcsparse_core` out. Does not import ComfyUI."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..mcsparse_core.context import AttentionCall, TokenLayout
from ..mcsparse_core.engine import attend, why_dense, why_not_self_attention
from ..mcsparse_core.run import SparseRun
from ..mcsparse_core.schedule import Action
from .attention_args import AttentionArgs, read
from .layouts import ForwardFacts, token_layout

KEY = "mc_sparse"  # of our session in transformer_options, and of our wrappers and attachment
BLOCK_KEY = "mc_sparse_block"  # (type, index, count) where this version of the host has no block keys of its own
OVERRIDE = "optimized_attention_override"
# Softmax attention in full precision: our exact kernels may stand in for these.
EXACT_FUNCTIONS = ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch", "attention_xformers", "attention_flash")


class Session:
    """Lives from the start of one sampling run to its end, in the transformer options of that run only.

    previous: the attention override that was installed before ours, or None: our dense path. outside_graph: a context in which
    memory that outlives a forward pass is allocated.
    """

    def __init__(self, run: SparseRun, previous: Callable | None = None, outside_graph: Callable[[], AbstractContextManager] = nullcontext):
        self.run = run
        self.previous = previous
        self.outside_graph = outside_graph
        self.calls = 0
        self.dense_path = _name(previous) if previous else None  # name of what runs the dense calls
        self._forward: ForwardFacts | None = None
        self._layouts: dict[tuple, TokenLayout | str] = {}
        self._unnamed_calls = 0  # eligible calls of this forward without a block key

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def begin_forward(self, options: Mapping, rows: int, forward: ForwardFacts):
        """A forward pass of so many batch rows begins, with these transformer options."""
        conds = tuple(zip(options.get("uuids") or (), options.get("cond_or_uncond") or (), strict=False))
        window = getattr(options.get("context_window"), "index_list", None)
        self.run.begin_forward(conds, rows, None if window is None else tuple(window), forward.latent[1:])
        self._forward = forward
        self._layouts.clear()
        self._unnamed_calls = 0

    def end_forward(self, options: Mapping, calls_before: int):
        """Says it if another override took ours off and this forward passed us by."""
        other = options.get(OVERRIDE)
        if self.calls == calls_before and other is not attention_override:
            self.say(f"another attention override ({_name(other)}) replaced MC-Sparse during the run: place it before MC-Sparse")

    def say(self, text: str):
        """A warning, once per run, in the log and in the report."""
        if text not in self.run.notes:
            logging.warning("MC-Sparse: %s", text)
            self.run.note(text)

    def close(self):
        """Lets go of everything but the run's numbers."""
        self.previous = None
        self._forward = None
        self._layouts.clear()

    def attention(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """One attention call of the host, whatever it is; calls that are no candidates go on as they came."""
        self.calls += 1
        self.dense_path = self.dense_path or _name(func)
        host = _Host(func, self.previous)
        call = read(args, kwargs)
        if call is None:
            self.run.stats.passed["unknown form"] += 1
            return host(*args, **kwargs)
        reason = why_not_self_attention(call.q, call.k, call.v, self.run.plan.min_tokens)
        if reason:
            self.run.stats.passed[reason] += 1
            return host(*args, **kwargs)
        output = self._eligible(call, host, kwargs.get("transformer_options") or {})
        if output is None:
            with self.run.stats.timed(Action.DENSE.value, call.q.device):
                return host(*args, **kwargs)
        return call.result(output)

    def _eligible(self, call: AttentionArgs, host: _Host, options: Mapping) -> Tensor | None:
        run, tokens = self.run, call.q.shape[2]
        site = run.site(*self._block(options))
        reason = run.decline or why_dense(run.plan, call.q, call.k, call.v, call.has_mask)
        layout = None if reason else self._layout(tokens, options.get("grid_sizes"))
        if isinstance(layout, str):
            reason, layout = layout, None
        with self.outside_graph():
            return attend(
                run,
                AttentionCall(
                    call.q, call.k, call.v, call.scale, site, run.branches(call.q.shape[0], tokens),
                    layout or TokenLayout(None, before=tokens),
                    dense=lambda rows: call.dense(host, rows),
                    exact_dense=host.is_exact,
                    low_precision=call.low_precision,
                ),
                reason,
            )  # fmt: skip

    def _block(self, options: Mapping) -> tuple[str, int, int]:
        if BLOCK_KEY in options:
            return options[BLOCK_KEY]
        if "block_index" in options:
            return str(options.get("block_type", "")), int(options["block_index"]), int(options.get("total_blocks", 0))
        self._unnamed_calls += 1
        return "call", self._unnamed_calls - 1, 0

    def _layout(self, tokens: int, grid_sizes) -> TokenLayout | str:
        if self._forward is None:
            return "unknown token order: no forward pass was announced"
        key = (tokens, grid_sizes)
        if key not in self._layouts:
            layout = token_layout(self._forward, tokens, None if grid_sizes is None else tuple(grid_sizes))
            self._layouts[key] = layout
            if isinstance(layout, str):
                self.say(f"{layout}; these calls stay dense")
            elif layout.before + layout.after and not layout.exact:
                share = (layout.before + layout.after) / tokens
                self.say(f"{share:.0%} of the tokens are conditioning: too many to keep exact, so they are sparse like the picture")
        return self._layouts[key]


class _Host:
    """The host's own attention: the override that was there before ours, or the function it gave us."""

    def __init__(self, func: Callable, previous: Callable | None):
        self._func, self._previous = func, previous

    def __call__(self, *args, **kwargs) -> Tensor:
        if self._previous is None:
            return self._func(*args, **kwargs)
        return self._previous(self._func, *args, **kwargs)

    @property
    def is_exact(self) -> bool:
        return self._previous is None and _name(self._func) in EXACT_FUNCTIONS


def _name(function) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


@torch.compiler.disable
def attention_override(func: Callable, *args, **kwargs) -> Tensor:
    """Attention of a run that MC-Sparse takes part in.

    One function for all runs, without state: compiled models keep a reference to it. Opaque to torch.compile, which would
    otherwise freeze the branch that the first call took.
    """
    session = (kwargs.get("transformer_options") or {}).get(KEY)
    if session is None:
        return func(*args, **kwargs)
    return session.attention(func, args, kwargs)
