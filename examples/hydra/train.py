"""A Hydra program: data module, model and Trainer with its callbacks come from conf/, echoing is a group of options there.

    python train.py                                      # only measured; the summary says whether echoing would pay
    python train.py echo=factor                          # conf/echo/factor.yaml
    python train.py echo=factor echo.factor=4 trainer.max_epochs=1
    python train.py --multirun echo=factor echo.factor=1,2,4
    python train.py --multirun echo=shared echo.share.wait_for=1 model.rate=0.01,0.003

A run's log folder is Hydra's output folder, with echo_summary.json in it.

Sharing (docs/sharing.md) needs trainings that run side by side. Hydra's own launcher runs the jobs of --multirun one by one, so
that each job of the last line above reads all data again. All that its jobs have in common is the process that reads: it stays
for `linger_seconds`, and reads ahead until its window is full. The second job need not start it: it waited 0.4 s for its first
batch, where the first job waited 14 s (two busy cores). To read the data once for both, start them side by side:

    python train.py echo=shared model.rate=0.01 & python train.py echo=shared model.rate=0.003 & wait

or let a launcher do so. hydra-joblib-launcher 1.2.0, its latest release, did so when tried; no test runs it. Its processes must
find spirals.py, too:

    PYTHONPATH=. python train.py --multirun hydra/launcher=joblib hydra.launcher.n_jobs=2 echo=shared model.rate=0.01,0.003
"""

import hydra
from hydra.utils import instantiate
from lightning import seed_everything


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    seed_everything(config.seed)
    trainer = instantiate(config.trainer)
    trainer.fit(instantiate(config.model), datamodule=instantiate(config.data))
    return trainer.callback_metrics["loss"].item()  # for a sweeper that looks for the best job


if __name__ == "__main__":
    main()
