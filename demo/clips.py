"""Procedural training clips: textured objects that move, spin and cover each other before a drifting textured background.

Every scene has a prompt that fixes shapes, colours, motion and background; the generator draws positions, speeds and phases.
All lengths are pixels and all times frames, so a larger grid is a larger window, not a magnified picture.
"""

import math
from dataclasses import dataclass

import torch

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Scene:
    """What a prompt fixes. Colours are RGB in 0..1: two that the texture mixes, two that the background mixes."""

    prompt: str
    shape: str
    count: int
    radius: float
    texture: str
    colours: tuple[RGB, RGB]
    motion: str
    background: str
    background_colours: tuple[RGB, RGB]


RED, WHITE, BLACK = (0.9, 0.12, 0.1), (0.97, 0.95, 0.9), (0.05, 0.05, 0.08)
SCENES = (
    Scene("a red checkered ball bouncing in front of blue waves", "ball", 1, 15, "checker", (RED, WHITE),
          "bounce", "waves", ((0.05, 0.2, 0.6), (0.35, 0.65, 0.95))),
    Scene("two green striped squares tumbling over an orange brick wall", "square", 2, 14, "stripes", ((0.1, 0.6, 0.2), (0.8, 0.95, 0.4)),
          "tumble", "bricks", ((0.85, 0.42, 0.15), (0.45, 0.2, 0.1))),
    Scene("yellow stars circling in a purple night sky", "star", 4, 12, "rings", ((1.0, 0.85, 0.1), (0.95, 0.55, 0.1)),
          "orbit", "stars", ((0.2, 0.08, 0.35), (0.85, 0.75, 1.0))),
    Scene("white rings drifting across a dark teal grid", "ring", 3, 14, "spokes", (WHITE, (0.6, 0.75, 0.8)),
          "drift", "grid", ((0.03, 0.25, 0.28), (0.15, 0.6, 0.6))),
    Scene("two magenta and cyan balls swinging before grey diagonal stripes", "ball", 2, 13, "stripes", ((0.9, 0.1, 0.7), (0.1, 0.85, 0.9)),
          "swing", "diagonals", ((0.35, 0.35, 0.38), (0.7, 0.7, 0.72))),
    Scene("orange triangles hopping over green hills", "triangle", 3, 13, "dots", ((1.0, 0.5, 0.05), (0.5, 0.15, 0.05)),
          "hop", "hills", ((0.55, 0.8, 0.95), (0.2, 0.55, 0.15))),
    Scene("a blue spoked wheel rolling through a yellow desert", "ball", 1, 17, "spokes", ((0.1, 0.25, 0.8), (0.75, 0.85, 1.0)),
          "roll", "hills", ((1.0, 0.6, 0.45), (0.85, 0.7, 0.25))),
    Scene("pink hearts rising past a mint polka dot wall", "heart", 3, 13, "checker", ((0.95, 0.35, 0.55), (1.0, 0.65, 0.75)),
          "rise", "polka", ((0.6, 0.9, 0.75), (0.3, 0.65, 0.55))),
)
MAX_OBJECTS = max(scene.count for scene in SCENES)
GOLDEN = 0.618


def prompts() -> list[str]:
    """The prompt of every scene, in the order of the scene indices."""
    return [scene.prompt for scene in SCENES]


@torch.no_grad()
def render(scenes, frames, height, width, generator):
    """Clips (B, 3, frames, height, width) float32 in [-1, 1] for scene indices `scenes` (B,), on the generator's device."""
    device = generator.device
    scenes = scenes.to(device)
    draw = Draws(scenes, generator)
    t = torch.arange(frames, device=device).view(1, -1, 1, 1)
    y = torch.arange(height, device=device).view(1, 1, -1, 1) + 0.5
    x = torch.arange(width, device=device).view(1, 1, 1, -1) + 0.5

    mix = pick(scenes, "background", backgrounds(x, y, t, height, draw))
    clip = paint(mix, colours(scenes, "background_colours"))
    radius = facts(scenes, "radius") * draw.size
    count = facts(scenes, "count")
    for index in range(MAX_OBJECTS):
        cx, cy, angle = pick(scenes, "motion", motions(t, index, count, radius, height, width, draw))
        u, v = (x - cx) / radius, (y - cy) / radius
        u, v = u * angle.cos() + v * angle.sin(), v * angle.cos() - u * angle.sin()
        inside = (step(-pick(scenes, "shape", shapes(u, v)) * radius, 2.5) * (index < count)).unsqueeze(1)
        shade = (1.1 - 0.3 * (u * u + v * v)).clamp(0.6, 1.1).unsqueeze(1)
        body = paint(pick(scenes, "texture", textures(u, v)), colours(scenes, "colours")) * shade
        clip = torch.lerp(clip, body, inside)
    return clip.clamp(0, 1) * 2 - 1


class Draws:
    """The random numbers of each clip, all (B, 1, 1, 1): `phase` and `phase2` in 0..1, signed `speed` and `size` around 1, `drift` in
    pixels per frame."""

    def __init__(self, scenes, generator):
        r = torch.rand(6, len(scenes), 1, 1, 1, device=generator.device, generator=generator)
        self.phase, self.phase2 = r[0], r[1]
        self.speed = (0.7 + 0.6 * r[2]) * torch.where(r[3] < 0.5, -1.0, 1.0)
        self.size = 0.85 + 0.3 * r[4]
        self.drift = 2.0 * r[5] - 1.0


def facts(scenes, field):
    """The number `field` of each clip's scene, (B, 1, 1, 1)."""
    return torch.tensor([float(getattr(s, field)) for s in SCENES], device=scenes.device)[scenes].view(-1, 1, 1, 1)


def colours(scenes, field):
    """The two colours `field` of each clip's scene, (B, 2, 3)."""
    return torch.tensor([getattr(s, field) for s in SCENES], device=scenes.device)[scenes]


def paint(mix, pair):
    """(B, T, H, W) in 0..1 and two colours (B, 2, 3) -> (B, 3, T, H, W)."""
    first, second = pair[:, 0, :, None, None, None], pair[:, 1, :, None, None, None]
    return first + (second - first) * mix.unsqueeze(1)


def pick(scenes, field, options):
    """For each clip the option its scene names: a tensor, or one tensor per entry if options are tuples."""
    names = list(options)
    wanted = torch.tensor([names.index(getattr(s, field)) for s in SCENES], device=scenes.device)[scenes].view(-1, 1, 1, 1)

    def select(tensors):
        chosen = tensors[0]
        for number, tensor in enumerate(tensors[1:], 1):
            chosen = torch.where(wanted == number, tensor, chosen)
        return chosen

    values = list(options.values())
    return tuple(select(parts) for parts in zip(*values, strict=True)) if isinstance(values[0], tuple) else select(values)


def step(value, sharpness):
    """Soft step from 0 to 1 at value 0: an antialiased edge if sharpness is about 4 / (change of value per pixel)."""
    return (value * sharpness).sigmoid()


def backgrounds(x, y, t, height, draw):
    """Mix (B, T, H, W) of the two background colours, by kind. Textures drift sideways, so they recur over the whole clip."""
    x = x + draw.drift * t + 64 * draw.phase2
    up = y + 0.35 * draw.drift.abs() * t + 64 * draw.phase
    tau = 2 * math.pi
    row = (up / 9).floor()
    mortar = torch.maximum(((x + 9 * (row % 2)) % 18 - 9).abs() - 9, (up % 9 - 4.5).abs() - 4.5)
    cell = ((x / 12).floor() * 12.9898 + (up / 12).floor() * 78.233).sin() * 437.585
    spot = lambda px, py, size: ((x % size - px) ** 2 + (up % size - py) ** 2).sqrt()  # noqa: E731
    ground = height * 0.62 + 5 * (tau * x / 46 + tau * draw.phase).sin() + 2.5 * (tau * x / 19).sin() - y
    furrows = 0.25 * (tau * (y + 3 * (tau * x / 46 + tau * draw.phase).sin()) / 8).sin()
    return {
        "waves": 0.5 + 0.5 * (tau * (y / 13 + 0.25 * (tau * (x + t * draw.drift.sign()) / 26).sin())).sin(),
        "bricks": step(mortar + 1.0, 4.0),
        "stars": step(1.2 + (cell % 1) - spot(3 + 6 * (cell * 1.7 % 1), 3 + 6 * (cell * 2.3 % 1), 12), 2.5),
        "grid": step(torch.maximum((x % 14 - 7).abs(), (up % 14 - 7).abs()) - 5.8, 2.5),
        "diagonals": step((tau * (x + y) / 17).sin(), 3.0),
        "hills": step(-ground, 1.5) * (0.75 + furrows),
        "polka": step(3.6 - torch.minimum(spot(4, 4, 16), spot(12, 12, 16)), 2.0),
    }


def motions(t, index, count, radius, height, width, draw):
    """(x, y, angle) of object `index` of `count`, each (B, T, 1, 1), by kind. Objects share a rule and are spread over its phase."""
    tau = 2 * math.pi
    share = index / count
    travel = draw.speed * t
    across = lambda position: (position + radius) % (width + 2 * radius) - radius  # noqa: E731
    down = lambda position: (position + radius) % (height + 2 * radius) - radius  # noqa: E731
    mirror = lambda position, room: ((position % (2 * room)) - room).abs() + radius  # noqa: E731
    room_x, room_y = (width - 2 * radius).clamp_min(1), (height - 2 * radius).clamp_min(1)
    arc = (t / 20 * draw.speed.abs() + draw.phase2 + share) % 1
    turn = tau * (draw.phase + share) + 0.13 * travel
    swing = 0.5 * (tau * (travel / 26 + draw.phase + 0.4 * share)).sin()
    rolling = mirror(1.7 * travel + 2 * room_x * draw.phase, room_x)
    still = torch.zeros_like(travel)
    return {
        "bounce": (mirror(1.6 * travel + 2 * room_x * draw.phase, room_x),
                   height - radius - 0.8 * room_y * 4 * arc * (1 - arc),
                   0.1 * travel),
        "tumble": (mirror(1.3 * travel + 2 * room_x * (draw.phase + 0.37 * index), room_x),
                   mirror(1.0 * travel + 2 * room_y * (draw.phase2 + 0.61 * index), room_y),
                   0.12 * travel + index),
        "orbit": (width / 2 + (width / 2 - radius) * 0.85 * turn.cos(),
                  height / 2 + (height / 2 - radius) * 0.85 * turn.sin(),
                  0.05 * travel),
        "drift": (across(width * (draw.phase + share) + 1.4 * travel),
                  down(height * (draw.phase2 + GOLDEN * index) + 0.8 * draw.speed.abs() * t),
                  0.06 * travel),
        "swing": (width * (index + 0.5) / count + 0.6 * height * swing.sin(), -0.05 * height + 0.7 * height * swing.cos(), -swing),
        "hop": (across((width + 2 * radius) * (draw.phase + share) + 1.3 * travel),
                height * 0.66 - 0.25 * height * (tau * (travel / 24 + draw.phase2 + 0.3 * index)).sin().abs(),
                still),
        "roll": (rolling, height - radius - 4 + still, rolling / radius),
        "rise": (width * ((draw.phase2 + share) % 1) + 5 * (0.2 * t + tau * (draw.phase + share)).sin(),
                 down(height * (draw.phase + GOLDEN * index) - 1.5 * draw.speed.abs() * t),
                 0.25 * (0.2 * t + index).sin() + still),
    }


def shapes(u, v):
    """Distance to the outline in object radii, negative inside, by kind. (u, v) are object coordinates in radii, v down."""
    distance = (u * u + v * v).sqrt()
    fifth = math.pi / 5
    angle = ((torch.atan2(u, -v) % (2 * fifth)) - fifth).abs()  # pi/5 on a tip, 0 in a notch
    tip, notch = 1.1, 0.5
    outline = tip * notch * math.sin(fifth) / (tip * (fifth - angle).sin() + notch * angle.sin())
    return {
        "ball": distance - 1,
        "square": torch.maximum(u.abs(), v.abs()) - 0.85,
        "triangle": torch.maximum(0.866 * u.abs() - 0.5 * v - 0.5, v - 0.55),
        "star": (distance - outline) * 0.6,
        "ring": (distance - 0.73).abs() - 0.27,
        "heart": ((u * 1.1) ** 2 + (-1.2 * v + 0.1 - 0.75 * (u * 1.1).abs().sqrt()) ** 2).sqrt() - 0.9,
    }


def textures(u, v):
    """Mix (B, T, H, W) of the two object colours, by kind, in object coordinates."""
    distance = (u * u + v * v).sqrt()
    return {
        "checker": step((1.25 * math.pi * u).sin() * (1.25 * math.pi * v).sin(), 8.0),
        "stripes": step((1.5 * math.pi * u).sin(), 5.0),
        "dots": step((2 * math.pi * u).cos() * (2 * math.pi * v + math.pi / 2).cos() - 0.3, 6.0),
        "spokes": torch.maximum(step((6 * torch.atan2(v, u)).sin(), 3.0) * step(0.85 - distance, 12.0), step(0.25 - distance, 12.0)),
        "rings": step((2.4 * math.pi * distance).cos() - 0.2, 3.0),
    }
