"""Runs the scenarios of one group in one ComfyUI process and writes {name: what it observed, or {"error": traceback}} as JSON.

driver.py GROUP OUT, with LAB_COMFYUI (the checkout) and LAB_WORK (a folder for weights) in the environment. GROUP is a module
`scenarios_<GROUP>` beside this file; its public functions are the scenarios, in order.
"""
import importlib
import inspect
import json
import sys
import time
import traceback
from pathlib import Path

group, out = sys.argv[1], Path(sys.argv[2])
only = sys.argv[3:]
importlib.import_module("lab")  # makes ComfyUI importable
module = importlib.import_module(f"scenarios_{group}")
results = {}
for name, function in vars(module).items():
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_") and (not only or name in only):
        began = time.perf_counter()
        try:
            results[name] = function()
        except BaseException:
            results[name] = {"error": traceback.format_exc()}
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
out.write_text(json.dumps(results))
