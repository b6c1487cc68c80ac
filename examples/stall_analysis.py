"""What a training waits for: the image folder of image_folder.py, analyzed; then what the analysis advises is tried.

Writes analysis.json, of which `lightning-echo report analysis.json --html analysis.html` makes a page.
"""

import tempfile
from pathlib import Path

from image_folder import TRAIN, Classifier, write_images
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from lightning_echo import StallAnalyzer
from lightning_echo.analysis.report import report

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), 512)
        loader = DataLoader(ImageFolder(folder, TRAIN), batch_size=32, shuffle=True, num_workers=1)
        analyzer = StallAnalyzer(Classifier(), loader, trainer_kwargs={"accelerator": "cpu"})
        analysis = analyzer.run(steps=30)
        analysis = analyzer.prove(analysis, seconds=10)
    print(report(analysis))
    analysis.to_json("analysis.json")
