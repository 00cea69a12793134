"""A data set of hospitals, each of which has its own scanner."""

from dataclasses import dataclass

import torch

from fedbench.api import Dataset, DatasetRequest, DatasetSource, Split, TensorImages, dataset, hyper, torch_generator


@dataclass(frozen=True, kw_only=True)
class ScansParams:
    """How many scans there are."""

    per_hospital: int = hyper(24, symbol="n", source="ours", low=8, high=1000)


class Scans(DatasetSource[ScansParams]):
    """Bright and dark squares from three hospitals, whose scanners differ in contrast."""

    name = "example-scans"

    def load(self, request: DatasetRequest) -> Dataset:
        """A quarter of each hospital's scans is tested."""
        hospitals = torch.arange(3).repeat_interleave(self.params.per_hospital)
        labels = torch.arange(len(hospitals)) % 2
        noise = torch.randn(len(hospitals), 3, 16, 16, generator=torch_generator(0, "scans"))
        contrast = 30 + 20 * hospitals
        level = 128 + (2 * labels - 1) * contrast
        images = (level[:, None, None, None] + 10 * noise).clamp(0, 255).to(torch.uint8)
        whole = Split(TensorImages(images), labels, clients=hospitals)
        is_test = torch.arange(len(hospitals)) % 8 < 2
        train, test = (whole.select(torch.nonzero(chosen).flatten()) for chosen in (~is_test, is_test))
        return dataset(request.text, ("healthy", "ill"), train, test, client_names=("Basel", "Bern", "Chur"))
