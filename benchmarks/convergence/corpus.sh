#!/bin/sh
# Makes the text of the convergence runs: documentation and source of Linux 6.1 as Debian ships it (GPL-2.0).
#   corpus.sh linux-source-6.1.tar.xz linux.txt.gz
# The archive is that of Debian's package linux-source-6.1 (6.1.192-2): `apt-get download linux-source-6.1`, then `dpkg -x`.
# Files are ordered by the SHA-256 of their names, so that the held-out end of the text is like the rest of it.
set -eu
archive=$(realpath "$1"); out=$(realpath "$2"); folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
cd "$folder"
top=linux-source-6.1
tar -xJf "$archive" --wildcards "$top/Documentation/*.rst" "$top/Documentation/*.txt" \
    $(for part in block crypto fs include/linux ipc kernel lib mm net security; do echo "$top/$part/*.[ch]"; done)
cd "$top"
find . -type f | LC_ALL=C sort | while read -r name; do printf '%s %s\n' "$(printf %s "$name" | sha256sum | cut -c1-64)" "$name"; done |
    LC_ALL=C sort | cut -d' ' -f2 | tr '\n' '\0' | xargs -0 cat | gzip -9n > "$out"
gzip -dc "$out" | wc -c
gzip -dc "$out" | sha256sum
