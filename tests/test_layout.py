"""The package list, the import directions, and that importing us changes nothing."""
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("demo", "kernels", "mcsparse_core", "nodes")
FORBIDDEN = {  # package -> roots it may not import
    "kernels": {"comfy", "diffusers", "nodes", "mcsparse_core", "demo", "PIL"},
    "mcsparse_core": {"comfy", "nodes", "demo", "PIL"},
    "nodes": {"diffusers"},
    "demo": {"comfy", "nodes"},
}
OPTIONAL = {"triton", "cutlass", "cuda", "flash_attn", "flash_attn_interface", "sageattention", "diffusers", "imageio", "lpips"}


def sources(package):
    return [p for p in (ROOT / package).rglob("*.py") if "out" not in p.parts]


def imports(path):
    """(module names, at module level) of every import; relative ones by their first part inside mc_sparse."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)}
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, id(node) not in inside) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = path.relative_to(ROOT).parts[: depth - node.level + 1]
                module = ".".join((*base, *filter(None, [module]))) or node.names[0].name
            yield module.removeprefix("mc_sparse."), id(node) not in inside


def test_package_list_matches_the_folders():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent for package in PACKAGES for p in sources(package)}
    assert all((f / "__init__.py").exists() for f in folders)
    assert listed == {"mc_sparse"} | {"mc_sparse." + ".".join(f.relative_to(ROOT).parts) for f in folders}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_only(package):
    for path in sources(package):
        for module, _ in imports(path):
            root = module.split(".")[0]
            if root == "diffusers" and path.name == "diffusers_host.py":
                continue
            assert root not in FORBIDDEN[package], f"{path.relative_to(ROOT)} imports {module}"


def test_only_nodes_imports_comfy():
    for path in [p for package in PACKAGES for p in sources(package)] + list(ROOT.glob("*.py")):
        if path.relative_to(ROOT).parts[0] != "nodes":
            assert not any(m.split(".")[0] in ("comfy", "comfy_api", "folder_paths", "server") for m, _ in imports(path)), path


def test_optional_packages_are_never_imported_at_module_level():
    for path in [p for package in ("kernels", "mcsparse_core", "nodes") for p in sources(package)] + list(ROOT.glob("*.py")):
        if path.name.startswith(("triton_", "cute_")):
            continue  # backends: imported only when considered
        wrong = [m for m, top in imports(path) if top and m.split(".")[0] in OPTIONAL]
        assert not wrong, (path, wrong)


def test_no_tests_folder_is_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_import_changes_nothing_and_needs_no_optional_package():
    code = f"""
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(OPTIONAL)!r}:
            raise ImportError(name + " is blocked by the test")
sys.meta_path.insert(0, Block())
import torch
before = (sorted(sys.path), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
import mc_sparse
light = [m for m in sys.modules if m.startswith("mc_sparse.")]
import mc_sparse.kernels, mc_sparse.mcsparse_core.engine, mc_sparse.mcsparse_core.diffusers_host
after = (sorted(sys.path), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
print(json.dumps(dict(light=light, same=before == after, names=[n for n in ("kernels", "nodes", "demo") if n in sys.modules])))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"light": [], "same": True, "names": []}


def test_version_is_stated_once_and_agrees():
    import mc_sparse

    assert mc_sparse.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
