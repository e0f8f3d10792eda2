"""One thread per library: tests run side by side on small machines, and sums keep one order."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
os.environ["LOCKSTEP_OFFLINE"] = "1"  # nothing is fetched but by the tests of that, from this machine

import cv2
import torch

torch.set_num_threads(1)
cv2.setNumThreads(0)
