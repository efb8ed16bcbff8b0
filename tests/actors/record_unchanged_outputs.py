"""Records `tests/golden/unchanged_outputs.json` anew: `python -m tests.actors.record_unchanged_outputs`.

Reads the requests from that file and writes them back with digests of the models and of the outputs. To add a request,
add an entry with `id`, `request` and `pool`, then run this. Only for changes that are meant to change outputs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Make all outputs and write the file; 1 when a request fails."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # after the environment is set: libraries read it when they are imported
    from tests.actors import unchanged_outputs as outputs

    record = outputs.load_record()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs.write_models(folder / "models")
        outputs.write_inputs(folder / "inputs")
        files = outputs.digests(folder / "models")
        made = dict(outputs.run_requests(folder, record["outputs"]))
    failed = {output_id: found for output_id, found in made.items() if isinstance(found, str)}
    for output_id, message in failed.items():
        print(f"{output_id}: {message}", file=sys.stderr)
    if failed:
        return 1
    recorded = []
    for output in record["outputs"]:
        found = made[output["id"]]
        # outputs of shared runs depend in their last digits on what was ready at the same moment
        exact = output["pool"].get("scheduler", {}).get("batch_limit", 1) == 1
        asked = {**{name: output[name] for name in ("id", "request", "pool")}, "exact": exact}
        described = {"dtype": str(found.dtype), "shape": list(found.shape)}
        digest = {"pixels_sha256": outputs.digest_of(found), "fingerprint": outputs.fingerprint(found)}
        recorded.append({**asked, **described, **digest})
    outputs.save_record({"files": files, "outputs": recorded})
    print(f"recorded {len(recorded)} outputs of {len(files)} files in {outputs.RECORD.relative_to(outputs.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
