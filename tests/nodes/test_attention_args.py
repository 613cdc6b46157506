"""ComfyUI's call forms, as each model family writes them, to (B, H, S, D) and back."""
import pytest
import torch

from mc_sparse.nodes.attention_args import read

B, H, S, D = 2, 3, 10, 4


def packed(seed=0, length=S, heads=H):
    return torch.randn(B, length, heads * D, generator=torch.Generator().manual_seed(seed))


def split(x, heads=H):
    return x.view(B, x.shape[1], heads, D).transpose(1, 2)


def host(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """Plain attention with ComfyUI's signature."""
    if not skip_reshape:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "form"),
    [
        ((), {"heads": H}, "packed"),  # Wan
        ((H,), {}, "packed"),  # LTX
        ((H,), {"skip_reshape": True, "mask": None}, "split"),  # HunyuanVideo, Flux
        ((H, None), {"skip_reshape": True}, "split"),  # Qwen-Image
        ((H,), {"skip_reshape": True, "skip_output_reshape": True}, "split"),  # Cosmos
        ((H, None, None, True, True), {}, "split"),
        ((), {"heads": H, "transformer_options": {}, "low_precision_attention": False, "_inside_attn_wrapper": True}, "packed"),
    ],
)
def test_every_form_gives_the_same_views_and_takes_the_same_result(args, kwargs, form):
    tensors = [packed(i) for i in range(3)]
    expected = host(*(split(t) for t in tensors), H, skip_reshape=True, skip_output_reshape=True)
    given = tuple(split(t) if form == "split" else t for t in tensors)
    call = read((*given, *args), kwargs)
    for view, tensor, original in zip((call.q, call.k, call.v), tensors, given, strict=True):
        torch.testing.assert_close(view, split(tensor), rtol=0, atol=0)
        assert view.data_ptr() == original.data_ptr() and view.shape == (B, H, S, D)
    assert not call.has_mask and call.scale == D**-0.5
    torch.testing.assert_close(call.result(expected), host(*given, *args, **kwargs))
    for rows in (slice(0, B), slice(1, 2)):
        torch.testing.assert_close(call.dense(host, rows), expected[rows])


def test_keyword_tensors():
    q, k, v = (packed(i) for i in range(3))
    call = read((), {"q": q, "k": k, "v": v, "heads": H})
    torch.testing.assert_close(call.dense(host, slice(1, 2)), host(q, k, v, H).view(B, S, H, D).transpose(1, 2)[1:])


def test_mask_is_seen_wherever_it_stands():
    q, mask = packed(), torch.zeros(S)
    assert read((q, q, q, H, mask), {}).has_mask and read((q, q, q), {"heads": H, "mask": mask}).has_mask


def test_low_precision_is_ruled_out_by_false_alone():
    q = packed()
    assert not read((q, q, q, H), {"low_precision_attention": False}).low_precision
    for said in ({}, {"low_precision_attention": True}, {"low_precision_attention": None}):
        assert read((q, q, q, H), said).low_precision


def test_given_scale():
    q = packed()
    assert read((q, q, q, H), {"scale": 0.25}).scale == 0.25 and read((q, q, q, H), {"scale": None}).scale == D**-0.5


def test_grouped_heads_keep_their_number():
    call = read((packed(), packed(1, heads=1), packed(2, heads=1), H), {"enable_gqa": True})
    assert call.q.shape[1] == H and call.k.shape[1] == call.v.shape[1] == 1


def test_other_key_length():
    assert read((packed(), packed(1, length=7), packed(2, length=7), H), {}).k.shape == (B, H, 7, D)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((packed(),), {"heads": H}),
        ((packed(), packed(), packed()), {}),  # no heads
        ((packed(), packed(), "not a tensor", H), {}),
        ((packed(), packed(), packed(), H), {"skip_reshape": True}),  # three dimensions, four announced
        ((packed(), packed(), packed(), H, None, None, False, False, "more"), {}),
    ],
)
def test_unknown_forms_are_declined(args, kwargs):
    assert read(args, kwargs) is None
