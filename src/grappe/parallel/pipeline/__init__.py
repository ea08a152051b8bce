"""Pipeline parallelism: cuts a model into stages that run one after the other, each on its own process."""
