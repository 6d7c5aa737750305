"""Models of a hub: named, listed, downloaded, or read over HTTP where they are.

- `HubName` (`names`): ``org/name[:QUANT][@REVISION]``, and which files of a repository it means.
- `answers`: requests to a hub, whose answers are checked before anything is made of them.
- `Repository` (`repository`): its files at one commit, and how they are read; errors.
- `download`: into huggingface_hub's cache, to be continued where it stopped.
- `Outline` (`outline`): a model directory with the headers of weight files and holes for data.
- `HubBytes` (`reader`): what the holes stand for, fetched ahead of its use.
"""
