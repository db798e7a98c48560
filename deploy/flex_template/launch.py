"""What the Flex Template's launcher runs: the command line of `pipeline.run`, which writes the job to `--template_location`."""

import sys

from pipeline.run import main

if __name__ == "__main__":
    sys.exit(main())
