"""What help pages say besides the flags: examples, and flags of YOLOv5 that are not there yet."""

# Features that YOLOv5 users know and that come later. Named here they are one clear error instead of a silent no-op;
# delete a line when its feature arrives. Keys: a flag, or a flag with one of its values.
TRAIN_NOT_YET = {
    "--cache val": "the image cache holds every split or none; use --cache ram, disk or off",
    "--image-weights": "every image is drawn once per epoch so far",
    "--evolve": "hyperparameters are not searched so far; pick a file with --hyp",
    "--evolve_population": "hyperparameters are not searched so far; pick a file with --hyp",
    "--resume_evolve": "hyperparameters are not searched so far; pick a file with --hyp",
    "--bucket": "results are written to the run folder only; copy that",
    "--quad": "batches hold single images only; use a larger --imgsz instead",
    "--entity": "no hosted logger is built in; results are in results.csv",
    "--upload_dataset": "no hosted logger is built in; results are in results.csv",
    "--bbox_interval": "no hosted logger is built in; results are in results.csv",
}
VAL_NOT_YET = {
    "--task study": "validation reports figures of a split so far; use --task train, val, test or speed",
    "--save-hybrid": "detections are scored, not written, so far",
    "--dnn": "only PyTorch checkpoints are read so far",
}
DETECT_NOT_YET = {
    "--device A,B": "detection runs on one device; name a single one, such as 0, cuda:0, mps or cpu",
    "--update": "best.pt is without its optimizer already; leave the flag out",
    "--dnn": "only PyTorch checkpoints are read so far",
    "--visualize": "feature maps are not drawn so far",
}


TRAIN_EXAMPLES = """Train a detector.

examples:
  python train.py                                         a small network on built-in drawn data
  python train.py --data my.yaml --cfg yolov5s.yaml --imgsz 640 --epochs 100
  python train.py --data my.yaml --weights best.pt        start from a checkpoint
  python train.py --resume                                go on with the newest stopped run"""


VAL_EXAMPLES = """Measure a checkpoint (--weights) on a split of a data set.

examples:
  python val.py --weights runs/train/exp/weights/best.pt
  python val.py --weights best.pt --data my.yaml --imgsz 640 --task test"""


DETECT_EXAMPLES = """Find objects in images, videos and streams (--source).

examples:
  python detect.py --weights runs/train/exp/weights/best.pt                 the pictures in data/images
  python detect.py --weights best.pt --source photo.jpg                     an image or a video
  python detect.py --weights best.pt --source photos --save-txt --nosave    a folder; text files only
  python detect.py --weights best.pt --source 'photos/**/*.jpg'             a pattern
  python detect.py --weights best.pt --source list.txt                      files, one in each line
  python detect.py --weights best.pt --source 0 --view-img                  a camera by its number
  python detect.py --weights best.pt --source rtsp://host/stream            or http, https, rtmp
  python detect.py --weights best.pt --source list.streams                  several of these at once"""
