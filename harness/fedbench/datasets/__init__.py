"""temporary"""
from pathlib import Path
from fedbench.types import Dataset, Split, TensorImages
def load_dataset(name, *, data_dir: Path, cache_dir: Path) -> Dataset:
    import hashlib, torch, os, numpy as np
    from fedbench.datasets.embedded import generate, TEN_CLASSES, CLASSNAMES, DOMAINS, Sampling
    f = Path(cache_dir) / "tmp_embedded.npz"
    if not f.exists():
        a = generate(1, 10000, TEN_CLASSES, sampling=Sampling(balanced=True)); b = generate(2, 2000, TEN_CLASSES, sampling=Sampling(balanced=True))
        f.parent.mkdir(parents=True, exist_ok=True)
        np.savez(f, a=a.images, al=a.labels, ad=a.domains, b=b.images, bl=b.labels, bd=b.domains)
    z = np.load(f); t = torch.from_numpy
    return Dataset("embedded", CLASSNAMES[:10], Split(TensorImages(t(z["a"])), t(z["al"]), t(z["ad"])), Split(TensorImages(t(z["b"])), t(z["bl"]), t(z["bd"])), "x", DOMAINS)
def dataset_names(): return {"embedded": "x"}
