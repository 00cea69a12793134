"""The second half of `fedbench.testing.check_resume`, in a process of its own: runs go on from their saved states.

    python -m fedbench.testing FOLDER METHOD... -- PLUGIN_FILE...

writes the digest of each method's last state to FOLDER/METHOD.digest; what plugins print is their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedbench.kinds.registry import plugins_everywhere
from fedbench.rounds.state import load_state
from fedbench.testing import digest, final_state, tiny_run, tiny_spec

if __name__ == "__main__":
    folder, end = Path(sys.argv[1]), sys.argv.index("--")
    with plugins_everywhere(map(Path, sys.argv[end + 1 :])):
        for name in sys.argv[2:end]:
            spec = tiny_spec(name)
            saved = load_state(folder / f"{name}.safetensors", spec.run_id)
            (folder / f"{name}.digest").write_text(digest(final_state(tiny_run(spec), saved)), encoding="utf-8")
