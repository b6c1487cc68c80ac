"""Object detection: boxes, joint transforms (torchvision's v2), a collate of lists. `auto` takes before_augmentation.

Image and target go through `transforms` together: an echo reuses both as they were decoded, and crops and flips both anew.
"""

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset
from torchvision import ops, tv_tensors
from torchvision.models.detection.fcos import FCOS, AnchorGenerator
from torchvision.transforms import v2

from lightning_echo import EchoDataModule

AUGMENT = [v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes(), v2.ToDtype(torch.float32, scale=True)]


class Squares(Dataset):
    def __init__(self, transforms):
        self.transforms = transforms

    def __len__(self):
        return 64

    def __getitem__(self, index):
        left, top = 7 * index % 44, 5 * index % 44  # drawn here, where yours is read and decoded
        image = tv_tensors.Image(torch.full((3, 64, 64), 50, dtype=torch.uint8))
        image[:, top : top + 20, left : left + 20] = 200
        boxes = tv_tensors.BoundingBoxes([[left, top, left + 20, top + 20]], format="XYXY", canvas_size=(64, 64))
        return self.transforms(image, {"boxes": boxes, "labels": torch.ones(1, dtype=torch.int64)})


def collate(examples):  # cropped images differ in size
    return [list(column) for column in zip(*examples, strict=True)]


class Detector(LightningModule):
    def __init__(self):
        super().__init__()
        backbone = torch.nn.Sequential(ops.Conv2dNormActivation(3, 16, stride=2), ops.Conv2dNormActivation(16, 32, stride=2))
        backbone.out_channels = 32
        anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
        self.model = FCOS(backbone, num_classes=2, min_size=64, max_size=64, anchor_generator=anchors)

    def training_step(self, batch):
        loss = sum(self.model(*batch).values())  # of images and targets
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    seed_everything(1)
    loader = DataLoader(Squares(v2.Compose(AUGMENT)), batch_size=8, shuffle=True, num_workers=2, collate_fn=collate)
    datamodule = EchoDataModule.from_dataloaders(loader, factor=4)  # <- the line that changes
    trainer = Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Detector(), datamodule=datamodule)
    print(f"{datamodule.loader}\n{datamodule.loader.counts}, loss {trainer.callback_metrics['loss']:.2f}")
