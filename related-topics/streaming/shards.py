"""Write the documentation that ships with Python to eight compressed shards, for streaming.

Here:      python related-topics/streaming/shards.py outputs/shards
"""

import gzip
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics


def main():
    """Write one record per paragraph."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for topic in topics.values() for text in topic.split("\n\n") if text.strip()]
    for number in range(8):
        with gzip.open(folder / f"{number}.json.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[number::8])


if __name__ == "__main__":
    main()
