"""What a fit measures before it trains: every spectrum once."""

import pytest
import torch

from lit_cond.callbacks import SpectralConditioning
from tests.tiny import make_loader, make_module, make_trainer


@pytest.mark.parametrize("roles", [None, ["query"]])
def test_every_spectrum_is_measured_once_when_a_fit_starts(tmp_path, monkeypatch, roles):
    module = make_module()
    callback = SpectralConditioning(roles=roles)
    measured = []
    original = torch.linalg.eigvalsh

    def counted(a):
        measured.append(len(a))
        return original(a)

    def described(self, pl_module, inner=SpectralConditioning.describe):
        text = inner(self, pl_module)
        rows = text.splitlines()[2:]
        seen.append((len(rows), sum("spectral x 1" in row for row in rows), sum(measured)))
        return text

    seen = []
    monkeypatch.setattr(torch.linalg, "eigvalsh", counted)
    monkeypatch.setattr(SpectralConditioning, "describe", described)
    make_trainer(tmp_path, [callback]).fit(module, make_loader())
    ((matrices, corrected, spectra),) = seen
    assert corrected == (matrices if roles is None else matrices // 3) > 0
    assert spectra == matrices + corrected


def test_a_later_description_measures_anew(tmp_path):
    module = make_module()
    callback = SpectralConditioning()
    make_trainer(tmp_path, [callback]).fit(module, make_loader())
    before = callback.describe(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(torch.rand_like(parameter))
    assert callback.describe(module) != before
