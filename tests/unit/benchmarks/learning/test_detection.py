import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning import detection
from learning.arms import Arm
from learning.detection import (
    CONTRAST,
    DETECTION,
    SIDE,
    ZOOM,
    StagedCanvases,
    collate,
    detection_loss,
    make_ssd,
    mean_average_precision_percent,
)
from learning.run import train
from torch import nn

SOLID = np.full((1, 8, 8), 16.0)  # a scan that fills its box, at full brightness


pytestmark = pytest.mark.usefixtures("one_thread")


def canvases(scans=None, count=60, seed=3):
    scans = np.arange(5 * 64, dtype=float).reshape(5, 8, 8) % 17 if scans is None else scans
    return StagedCanvases(scans, np.arange(len(scans)) % 10, count, seed)


class Answers(nn.Module):
    """A model that says what it is told, and keeps what it was asked."""

    def __init__(self, answers=()):
        super().__init__()
        self.weight, self.answers, self.asked = nn.Parameter(torch.zeros(1)), answers, []

    def forward(self, images):
        self.asked.extend(images)
        return self.answers or [found([], [])] * len(images)


def listed(example):
    canvas, boxes, labels = example
    return np.array(canvas).tolist(), boxes.tolist(), labels.tolist()


def found(boxes, labels):
    boxes = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    return {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "scores": torch.ones(len(boxes))}


class TestCanvases:
    def test_are_a_function_of_seed_and_index(self):
        first, again, other = canvases(), canvases(), canvases(seed=4)
        for index in (0, 59, 7):
            assert listed(first.load(index)) == listed(again.load(index))
        assert any(np.array(first.load(k)[0]).tobytes() != np.array(other.load(k)[0]).tobytes() for k in range(5))
        assert len({np.array(first.load(k)[0]).tobytes() for k in range(60)}) == 60

    def test_hold_one_to_four_digits_apart_and_nothing_beside_them(self):
        numbers = set()
        for index in range(60):
            canvas, boxes, labels = canvases().load(index)
            pixels, owner = np.array(canvas), np.zeros((SIDE, SIDE), int)
            for left, top, right, bottom in boxes.int().tolist():
                assert 0 <= left < right <= SIDE
                assert 0 <= top < bottom <= SIDE
                assert 10 <= bottom - top <= 20
                owner[top:bottom, left:right] += 1
            assert owner.max() == 1
            assert not pixels[owner == 0].any()
            assert len(labels) == len(boxes)
            numbers.add(len(boxes))
        assert numbers == {1, 2, 3, 4}

    def test_label_each_box_with_the_digit_whose_scan_is_in_it(self):
        scans = np.stack([np.full((8, 8), (digit + 1) * 16 / 255) for digit in range(10)])  # of one brightness each: digit + 1
        for index in range(30):
            canvas, boxes, labels = canvases(scans).load(index)
            for (left, top, right, bottom), label in zip(boxes.int().tolist(), labels.tolist(), strict=True):
                assert set(np.array(canvas)[top:bottom, left:right].flat) == {label}

    def test_of_training_and_held_out_share_no_scan(self, monkeypatch):
        pytest.importorskip("pycocotools")
        scans = np.stack([np.full((8, 8), (k + 1) * 16 / 255) for k in range(200)])  # told apart by their brightness
        monkeypatch.setattr(detection, "load_digits", lambda: SimpleNamespace(images=scans, target=np.arange(200) % 10))
        monkeypatch.setattr(detection, "HELD_OUT_SCANS", 80)
        split, asked = detection.detection_split(5), Answers()
        split.evaluate(asked)
        trained = {value for index in range(300) for value in np.array(split.train.load(index)[0]).flat} - {0}
        held_out = {round(255 * value.item()) for image in asked.asked for value in image.unique()} - {0}
        assert len(asked.asked) == detection.HELD_OUT_CANVASES
        assert len(trained) == 120
        assert 60 < len(held_out) <= 80
        assert not trained & held_out


class TestAugment:
    def test_moves_boxes_with_their_digits_and_clips_them(self):
        data, dropped, changes = canvases(SOLID), 0, []
        for index in [k for k in range(60) if len(data.load(k)[1]) == 1]:
            for _ in range(20):
                before = data.load(index)[1][0]
                image, target = data.augment(data.load(index))
                rows, columns = np.nonzero(image[0].numpy() > image.max().item() / 2)
                if len(target["boxes"]) == 0:  # more than half of it is out of sight
                    assert len(rows) == 0 or {rows.min(), columns.min()} & {0} or {rows.max(), columns.max()} & {SIDE - 1}
                    dropped += 1
                    continue
                seen = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                torch.testing.assert_close(target["boxes"][0], seen.float(), atol=0.75, rtol=0)
                assert target["labels"].tolist() == [1]
                assert 0.99 * CONTRAST[0] <= image.max() <= 1
                if target["boxes"].min() > 0 and target["boxes"].max() < SIDE:  # all in sight
                    changes.append((target["boxes"][0, 2:] - target["boxes"][0, :2]) / (before[2:] - before[:2]))
        zooms = torch.stack(changes)
        assert dropped > 0
        torch.testing.assert_close(zooms[:, 0], zooms[:, 1])  # a square stays one
        assert 1 / ZOOM[1] <= zooms.min() < 0.9
        assert 1.1 < zooms.max() <= 1 / ZOOM[0]

    def test_is_random_and_repeated_by_the_seed(self):
        data = canvases()
        torch.manual_seed(1)
        image, target = data.augment(data.load(0))
        other, _ = data.augment(data.load(0))
        torch.manual_seed(1)
        again, target_again = data.augment(data.load(0))
        assert torch.equal(image, again)
        assert torch.equal(target["boxes"], target_again["boxes"])
        assert not torch.equal(image, other)

    def test_leaves_the_example_that_is_reused_as_it_was(self):
        data = canvases()
        canvas, boxes, labels = data.load(1)
        data.augment((canvas, boxes, labels))
        assert listed((canvas, boxes, labels)) == listed(data.load(1))

    def test_keeps_as_many_labels_as_boxes_in_order(self):
        scans = np.stack([np.full((8, 8), (digit + 1) * 16 / 255 * 20) for digit in range(10)])
        data = canvases(scans)
        for index in [*range(60)] * 10:
            image, target = data.augment(data.load(index))
            assert len(target["boxes"]) == len(target["labels"])
            middles = ((target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2).int().tolist()
            shown = [image[0, min(y, SIDE - 1), min(x, SIDE - 1)].item() for x, y in middles]
            by_label = [value / label for value, label in zip(shown, target["labels"].tolist(), strict=True)]
            assert by_label == pytest.approx(by_label[:1] * len(by_label), rel=0.06)


def test_collate_stacks_images_and_lists_boxes_of_any_number():
    numbers = (2, 0, 4)
    examples = [(torch.full((1, SIDE, SIDE), k), {"boxes": torch.ones(k, 4), "labels": torch.arange(k)}) for k in numbers]
    images, targets = collate(examples)
    assert images.shape == (3, 1, SIDE, SIDE)
    assert images[:, 0, 0, 0].tolist() == [2, 0, 4]
    assert [len(target["boxes"]) for target in targets] == [2, 0, 4]
    assert [target["labels"].tolist() for target in targets] == [[0, 1], [], [0, 1, 2, 3]]


class TestLoss:
    BOXES = ((10.0, 8.0, 20.0, 22.0), (23.0, 22.0, 36.0, 40.0))

    def anchors(self):
        """Centre and side of the squares: two sizes in each cell of 4 pixels, two in each of 8."""
        small, between, large = 0.22 * SIDE, math.sqrt(0.22 * 0.34) * SIDE, 0.34 * SIDE
        sides = {4: (small, between), 8: (large, math.sqrt(0.34 * 0.5) * SIDE)}
        middles = {step: [(k + 0.5) * step for k in range(SIDE // step)] for step in sides}
        return [(x, y, side) for step in sides for y in middles[step] for x in middles[step] for side in sides[step]]

    def test_of_a_model_that_knows_nothing_is_what_the_matched_anchors_say(self):
        model = make_ssd()
        for parameter in model.head.parameters():  # all classes equally likely, all boxes where the anchors are
            nn.init.zeros_(parameter)
        targets = [{"boxes": torch.tensor(self.BOXES), "labels": torch.tensor([3, 10])}]
        matched = self.matched()
        assert 2 < len(matched) < 250
        offsets = [self.smooth_l1(part) for pair in matched for part in self.encoded(*pair)]
        # each of the matched anchors, and three others for each, guess one of ten digits or none
        expected = sum(offsets) / len(matched) + 4 * math.log(11)
        loss = detection_loss(model.train(), (torch.rand(1, 1, SIDE, SIDE), targets))
        assert loss.item() == pytest.approx(expected, rel=1e-4)

    def test_of_canvases_without_a_box_is_zero_and_can_be_stepped_on(self):
        model = make_ssd().train()
        empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
        loss = detection_loss(model, (torch.rand(2, 1, SIDE, SIDE), [empty, empty]))
        loss.backward()
        assert loss.item() == 0

    def matched(self):
        anchors, pairs = self.anchors(), []
        best = [max(range(len(anchors)), key=lambda k, box=box: self.overlap(anchors[k], box)) for box in self.BOXES]
        for k, anchor in enumerate(anchors):
            box = max(self.BOXES, key=lambda box, anchor=anchor: self.overlap(anchor, box))
            if k in best:
                pairs.append((anchor, self.BOXES[best.index(k)]))
            elif self.overlap(anchor, box) >= 0.5:
                pairs.append((anchor, box))
        return pairs

    def overlap(self, anchor, box):
        x, y, side = anchor
        width = max(0, min(x + side / 2, box[2]) - max(x - side / 2, box[0]))
        height = max(0, min(y + side / 2, box[3]) - max(y - side / 2, box[1]))
        both = width * height
        return both / (side * side + (box[2] - box[0]) * (box[3] - box[1]) - both)

    def encoded(self, anchor, box):
        """SSD's offsets: 10 times those of the centre, 5 times the logarithm of the size's ratio."""
        x, y, side = anchor
        middle = ((box[0] + box[2]) / 2 - x, (box[1] + box[3]) / 2 - y)
        size = (box[2] - box[0], box[3] - box[1])
        return [10 * part / side for part in middle] + [5 * math.log(part / side) for part in size]

    def smooth_l1(self, value):
        return value * value / 2 if abs(value) < 1 else abs(value) - 0.5


class TestMeanAveragePrecision:
    TRUTH = (found([(0, 0, 10, 10), (12, 12, 22, 30)], [1, 2]), found([(5, 5, 15, 20)], [1]))

    @pytest.mark.parametrize(
        ("answers", "expected"),
        [
            (TRUTH, 100.0),
            ((), 0.0),
            ([found([(0, 0, 10, 10), (12, 12, 22, 30)], [2, 1]), found([(5, 5, 15, 20)], [2])], 0.0),  # no label is right
            ([found([(0, 0, 10, 10)], [1]), found([(5, 5, 15, 20)], [1])], 50.0),  # one of two classes
            # overlaps of 0.62 count at three of the ten thresholds 0.50, 0.55 ... 0.95
            ([found([(0, 0, 10, 6.2), (12, 12, 22, 23.16)], [1, 2]), found([(5, 5, 15, 14.3)], [1])], 30.0),
        ],
    )
    def test_is_cocos(self, answers, expected):
        pytest.importorskip("pycocotools")
        targets = [{"boxes": one["boxes"], "labels": one["labels"]} for one in self.TRUTH]
        images = torch.zeros(2, 1, SIDE, SIDE)
        assert mean_average_precision_percent(Answers(answers), [(images, targets)]) == pytest.approx(expected)


class TestRun:
    @pytest.mark.parametrize("point", DETECTION.points)
    def test_trains_at_each_point(self, monkeypatch, point):
        pytest.importorskip("pycocotools")
        monkeypatch.setattr(detection, "HELD_OUT_CANVASES", 6)
        task = replace(DETECTION.quick(), budget_examples=96, spacing_examples=48)
        run = train(task, Arm(2, point), task.rates[0], 101, ends_at_target=False)
        assert [one.fresh // 48 for one in run.evaluations] == [1, 2]
        # twice as many used as were read, but for the few that are still live
        assert run.evaluations[-1].steps * task.batch_size == pytest.approx(2 * run.evaluations[-1].fresh, abs=32)
        assert all(0 <= one.value <= 100 for one in run.evaluations)

    def test_learns_what_is_on_eight_canvases(self):
        data = canvases(count=8)
        torch.manual_seed(0)
        model, batch = make_ssd().train(), collate([data.augment(data.load(index)) for index in range(8)])
        optimizer = DETECTION.make_optimizer(model.parameters(), DETECTION.rates[1])
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            losses.append(DETECTION.loss(model, batch))
            losses[-1].backward()
            optimizer.step()
        assert losses[-1].item() < losses[0].item() / 2
