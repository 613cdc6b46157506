"""Train the demo model from nothing.

    python demo/train.py --minutes 8.1

made the shipped model on one H200: 8702 steps, the stages of STAGES by wall time, so another machine makes more or fewer steps.
Flow matching on endless procedural clips: x_t = (1 - s) x0 + s noise, target noise - x0, timestep 1000 s. Needs diffusers and a CUDA
GPU; `--device cpu --minutes 1` only shows that it runs.
"""

import argparse
import csv
import importlib.util
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
try:
    from mc_sparse.demo import clips, codec, model, prompts
except ImportError:  # not installed: this folder as a package of its own
    spec = importlib.util.spec_from_file_location("demo", HERE / "__init__.py", submodule_search_locations=[str(HERE)])
    sys.modules["demo"] = importlib.util.module_from_spec(spec)
    from demo import clips, codec, model, prompts

# (share of the time at which the stage ends, latent grids drawn in turn with their batch sizes). First many small clips for looks and
# motion, then the demo grid, at last other sizes among it, so that up to 12,000 tokens stay sane.
STAGES = (
    (0.20, (((5, 24, 24), 64), ((7, 24, 24), 48))),
    (0.82, (((13, 36, 36), 16),)),
    (1.00, (((13, 36, 36), 16), ((16, 54, 56), 6), ((13, 36, 36), 16), ((9, 44, 52), 12), ((13, 36, 36), 16), ((21, 30, 44), 10))),
)
LEARNING_RATE = 1e-3
TEXT_DROPOUT = 0.1
EMPTY = len(clips.SCENES)  # row of the empty prompt in prompts.table()


def batches(grid, size, generator, ahead=4):
    """Endless batches: latents (size, 16, *grid) and scene indices (size,), rendered `ahead` batches at a time to save kernel launches."""
    frames, height, width = grid
    while True:
        scenes = torch.randint(EMPTY, (ahead * size,), device=generator.device, generator=generator)
        latents = codec.encode(clips.render(scenes, 2 * frames, 2 * height, 2 * width, generator))
        yield from zip(latents.split(size), scenes.split(size), strict=True)


def noise_levels(size, generator):
    """Levels s (size,) in 0..1: shifted logit-normal, stratified over the batch."""
    strata = torch.arange(size, device=generator.device) + torch.rand(size, device=generator.device, generator=generator)
    normal = torch.special.ndtri((strata / size).clamp(1e-4, 1 - 1e-4))
    return model.shifted((1.2 * normal).sigmoid())


def learning_rate(step, share):
    """Warm-up over 200 steps, constant for half of the time, then linear to a fiftieth."""
    return LEARNING_RATE * min(1, (step + 1) / 200) * min(1, max(0.02, 2 * (1 - share)))


def train(args):
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    net = model.new().to(device).train()
    names, parameters = zip(*net.named_parameters(), strict=True)
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    if device.type == "cuda":
        net.compile_repeated_blocks(dynamic=False)
    table = prompts.table().to(device)
    sources = {grid: batches(grid, size, generator) for _, grids in STAGES for grid, size in grids}

    log, step, start = [], 0, time.time()
    while (share := (time.time() - start) / (60 * args.minutes)) < 1:
        grids = next(grids for end, grids in STAGES if share < end)
        grid, size = grids[step % len(grids)]
        clean, scenes = next(sources[grid])
        scenes = scenes.masked_fill(torch.rand(size, device=device, generator=generator) < TEXT_DROPOUT, EMPTY)
        level = noise_levels(size, generator)
        noise = torch.randn(clean.shape, device=device, generator=generator)
        noisy = torch.lerp(clean, noise, level.view(-1, 1, 1, 1, 1))
        with torch.autocast(device.type, torch.bfloat16):
            velocity = net(noisy, 1000 * level, table[scenes]).sample
        loss = F.mse_loss(velocity.float(), noise - clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, share)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, parameters, 1 - min(0.999, (step + 1) / (step + 50)))
        if step % 20 == 0:
            log.append((step, round(time.time() - start, 1), "x".join(map(str, grid)), round(loss.item(), 5)))
            if step % 200 == 0:
                print(*log[-1], flush=True)
        step += 1
    print(f"{step} steps in {args.minutes} minutes")
    return dict(zip(names, average, strict=True)), log


def statistics(generator, clip_count=256):
    """Print sqrt(standard deviation) of each unscaled channel: the codec's SCALE."""
    latents = codec.encode(clips.render(torch.arange(clip_count) % EMPTY, 26, 72, 72, generator))
    deviation = latents.std((0, 2, 3, 4)) * torch.tensor(codec.SCALE)
    print("SCALE =", tuple(round(value, 3) for value in deviation.sqrt().tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.1, help="time to train, compilation included")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for model.safetensors, config.json and report/loss.csv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", action="store_true", help="only write prompts.safetensors")
    parser.add_argument("--statistics", action="store_true", help="only print the SCALE of the codec")
    args = parser.parse_args()
    if args.prompts:
        prompts.write(clips.prompts())
    elif args.statistics:
        statistics(torch.Generator().manual_seed(args.seed))
    else:
        weights, log = train(args)
        (args.out / "report").mkdir(parents=True, exist_ok=True)
        model.save(weights, args.out)
        with open(args.out / "report" / "loss.csv", "w", newline="") as file:
            csv.writer(file).writerows([("step", "seconds", "latent_grid", "loss"), *log])
