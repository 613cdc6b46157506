"""A tiny trained Wan 2.1 video model with its codec, prompts and procedural training clips, small enough to ship."""
