"""The inputs and the accuracy rule that the other tests lean on."""
import pytest
import torch

from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layout_and_slack_do_not_change_the_values(kind, layout):
    plain = make_qkv(2, 3, 50, 8, kind=kind)
    for x, y in zip(plain, make_qkv(2, 3, 50, 8, kind=kind, layout=layout, nan_slack=2), strict=True):
        assert torch.equal(x, y)
        assert y.stride(3) == 1 and y.is_contiguous() is False
        whole = torch.as_strided(y, (y.untyped_storage().nbytes() // 4,), (1,), 0)
        assert int(whole.isnan().sum()) == whole.numel() - y.numel() > 0
    assert make_qkv(2, 3, 50, 8, kind=kind, layout="bshd")[0].transpose(1, 2).is_contiguous()


def test_ties_are_ties():
    _, k, _ = make_qkv(1, 1, 11, 8, kind="ties")
    assert torch.equal(k[0, 0, 5:10], k[0, 0, :5])


def test_seeds_differ():
    assert not torch.equal(make_qkv(seed=0)[0], make_qkv(seed=1)[0])


EXACT = torch.tensor([1.0, -2.0, 4.0])


@pytest.mark.parametrize(
    "out, same_dtype",
    [
        (EXACT + 2e-3, EXACT + 0.9e-3),
        (EXACT + torch.tensor([0, 0, 1e-6]), EXACT),  # two steps are 4.8e-7
        (torch.tensor([1.0, -2.0, torch.nan]), EXACT),
        (torch.tensor([1.0, -2.0, torch.inf]), EXACT),
        (EXACT[:2], EXACT),
    ],
)
def test_the_rule_refuses(out, same_dtype):
    with pytest.raises(AssertionError):
        assert_no_worse_than(out, EXACT, same_dtype)


def test_the_rule_accepts():
    assert_no_worse_than(EXACT + 1.9e-3, EXACT, EXACT + 1e-3)
    assert_no_worse_than(EXACT + torch.tensor([0, 0, 4.7e-7]), EXACT, EXACT)
    assert_no_worse_than(torch.tensor([-torch.inf, 1]), torch.tensor([-torch.inf, 1]), torch.tensor([0.0, 1]))
    with pytest.raises(AssertionError, match="infinities"):
        assert_no_worse_than(torch.tensor([0.0, 1]), torch.tensor([-torch.inf, 1]), torch.tensor([-torch.inf, 1]))
