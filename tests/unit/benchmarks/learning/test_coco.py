import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learning.arms import Arm
from learning.run import train
from PIL import Image
from torch import nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

pytest.importorskip("pycocotools")
from learning import detection
from learning.coco import SIDE, StagedCoco, coco_task, make_ssd300  # after the line above: the data set cannot do without

WIDTH, HEIGHT = 400, 200


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Black images of 400 x 200 with a white rectangle: what COCO unpacks, in miniature."""
    write_part(tmp_path, "train2017", [(40 + 20 * k, 30 + 5 * k, 120, 80) for k in range(6)])
    write_part(tmp_path, "val2017", [(80, 40, 160, 100), (200, 20, 100, 60)])
    return tmp_path


def write_part(root, part, rectangles):
    (root / part).mkdir()
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for k, (x, y, width, height) in enumerate(rectangles):
        pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        pixels[y : y + height, x : x + width] = 255
        Image.fromarray(pixels).save(root / part / f"{k}.jpg", quality=95)
        images.append({"id": 10 + k, "file_name": f"{k}.jpg", "width": WIDTH, "height": HEIGHT})
        others = [{"bbox": [0, 0, 90, 90], "iscrowd": 1}, {"bbox": [5, 5, 0, 7], "iscrowd": 0}]
        for other in ({"bbox": [x, y, width, height], "iscrowd": 0}, *others):
            annotations.append({"id": len(annotations) + 1, "image_id": 10 + k, "category_id": 18, "area": 1, **other})
    images.append({"id": 99, "file_name": "0.jpg", "width": WIDTH, "height": HEIGHT})  # nothing on it
    content = {"images": images, "annotations": annotations, "categories": [{"id": 18, "name": "dog"}]}
    (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


class TestStagedCoco:
    def test_loads_the_resized_image_with_its_boxes_without_crowds_and_empty_ones(self, root):
        image, boxes, labels = StagedCoco(root, "train2017").load(1)
        assert image.size == (SIDE, SIDE)
        # x times 300/400, y times 300/200
        assert boxes.tolist() == [[45.0, 52.5, 135.0, 172.5]]
        assert labels.tolist() == [18]

    def test_moves_boxes_with_what_they_hold(self, root):
        data = StagedCoco(root, "train2017")
        example, seen = data.load(0), set()
        torch.manual_seed(0)
        for _ in range(30):
            image, target = data.augment(example)
            assert type(image) is type(target["boxes"]) is torch.Tensor
            assert image.shape == (3, SIDE, SIDE)
            assert image.dtype == torch.float32
            rows, columns = np.nonzero(image[0].numpy() > 0.5)
            shown = torch.tensor([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]])
            # a crop counts whole pixels and is enlarged up to 3.4 times; JPEG blurs the edges
            torch.testing.assert_close(target["boxes"], shown.float(), atol=5, rtol=0)
            assert target["labels"].tolist() == [18]
            seen.add(tuple(target["boxes"].round().flatten().tolist()))
        assert len(seen) > 10

    def test_takes_images_with_nothing_on_them(self, root):
        data = StagedCoco(root, "train2017")
        assert len(data) == 7
        image, target = data[6]
        assert image.shape == (3, SIDE, SIDE)
        assert target["boxes"].shape == (0, 4)
        assert target["labels"].shape == (0,)

    def test_says_what_is_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="root must hold COCO's train2017, got"):
            StagedCoco(tmp_path, "train2017")
        (tmp_path / "train2017").mkdir()
        with pytest.raises(FileNotFoundError, match=r"COCO's annotations.instances_train2017\.json"):
            StagedCoco(tmp_path, "train2017")


class TestCocoTask:
    def test_has_torchvisions_ssd300_whose_losses_are_the_tasks(self, root):
        task = coco_task(root)
        model, parts = make_ssd300().train(), {}
        model.register_forward_hook(lambda model, given, losses: parts.update(losses))
        loss = task.loss(model, detection.collate([task.make_split(1).train[0]]))
        assert set(parts) == {"bbox_regression", "classification"}
        assert loss.item() == pytest.approx(sum(part.item() for part in parts.values()))
        assert loss.item() > 0
        assert loss.requires_grad

    def test_evaluates_on_held_out_images_as_they_are(self, root):
        class Knows(nn.Module):
            """Says what was written into the validation set, in pixels of the resized images."""

            def __init__(self, first, second):
                super().__init__()
                self.weight, self.boxes = nn.Parameter(torch.zeros(1)), (first, second)

            def forward(self, images):
                return [self.answer(image) for image in images]

            def answer(self, image):
                is_second = image[0, 50, 200].item() > 0.5
                return {"boxes": torch.tensor([self.boxes[is_second]]), "labels": torch.tensor([18]), "scores": torch.ones(1)}

        split = coco_task(root).make_split(1)
        nowhere = (0.0, 0.0, 9.0, 9.0)
        # the third image repeats the first without annotations: a false one of the same score as the true ones
        assert split.evaluate(Knows((60.0, 60.0, 180.0, 210.0), (150.0, 30.0, 225.0, 120.0))) > 60
        assert split.evaluate(Knows(nowhere, nowhere)) == 0

    def test_trains_with_echoing_before_the_augmentation(self, root):
        task = replace(
            coco_task(root), make_model=small_ssd, batch_size=2, budget_examples=8, spacing_examples=4, cached_examples=7
        )
        run = train(task, Arm(2, "before_augmentation"), task.rates[0], 101, ends_at_target=False)
        assert [one.fresh // 4 for one in run.evaluations] == [1, 2]
        assert run.evaluations[-1].steps > 4


def small_ssd():
    """In the place of SSD300, which takes seconds a step."""
    backbone = nn.Sequential(nn.Conv2d(3, 8, 10, 10), nn.ReLU(), nn.Conv2d(8, 8, 6, 6), nn.ReLU())
    backbone.out_channels = [8]
    return SSD(backbone, DefaultBoxGenerator([[2]], scales=[0.3, 0.6]), (SIDE, SIDE), 91, detections_per_img=5)
