#!/usr/bin/env bash
# Building a layer beside its peers, in one run: bench/build.sh LAYERPACK DIR
# LAYERPACK is a release binary, DIR the tree to pack (a root filesystem of some hundred MB).
# Needs erofs-utils, squashfs-tools, zstd. Prints wall and CPU seconds, medians of three rounds in
# which the candidates alternate, and bytes. Writes below a scratch directory that it removes.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 LAYERPACK DIR" >&2; exit 2; }
bin=$(realpath "$1") dir=$(realpath "$2")
work=$(mktemp -d -p "${TMPDIR:-/tmp}" layerpack-bench.XXXXXX)
trap 'rm -rf "$work"' EXIT
rounds=3
pack() { "$bin" -q build --root "$work/root" --store "$1" --kind base --name bench --version 1 --from "dir:$dir" >"$work/out"; }
candidate() {
  case $1 in
    layerpack) rm -rf "$work/store"; pack "$work/store" ;;
    layerpack-again) pack "$work/store" ;;
    tar-zstd-3) tar -C "$dir" -cf - . | zstd -q -3 -T0 -f -o "$work/tar.zst" ;;
    mksquashfs-zstd-3) rm -f "$work/sq"; mksquashfs "$dir" "$work/sq" -comp zstd -Xcompression-level 3 -quiet -no-progress >/dev/null 2>&1 ;;
    mksquashfs-zstd) rm -f "$work/sq15"; mksquashfs "$dir" "$work/sq15" -comp zstd -quiet -no-progress >/dev/null 2>&1 ;;
    mkfs.erofs) rm -f "$work/plain"; mkfs.erofs "$work/plain" "$dir" >/dev/null 2>&1 ;;
    mkfs.erofs-lz4hc) rm -f "$work/lz4hc"; mkfs.erofs -zlz4hc "$work/lz4hc" "$dir" >/dev/null 2>&1 ;;
  esac
}
size() {
  case $1 in
    layerpack|layerpack-again) du -sb "$work/store" | cut -f1 ;;
    tar-zstd-3) stat -c %s "$work/tar.zst" ;;
    mksquashfs-zstd-3) stat -c %s "$work/sq" ;;
    mksquashfs-zstd) stat -c %s "$work/sq15" ;;
    mkfs.erofs) stat -c %s "$work/plain" ;;
    mkfs.erofs-lz4hc) stat -c %s "$work/lz4hc" ;;
  esac
}
names=(layerpack layerpack-again tar-zstd-3 mksquashfs-zstd-3 mksquashfs-zstd mkfs.erofs mkfs.erofs-lz4hc)
find "$dir" -xdev -type f -exec cat {} + >/dev/null # everybody reads from the page cache
TIMEFORMAT='%R %U %S'
for _ in $(seq $rounds); do
  for name in "${names[@]}"; do
    { time candidate "$name"; } 2>>"$work/$name.times"
  done
done
printf '%-20s %8s %8s %14s\n' candidate wall/s cpu/s bytes
for name in "${names[@]}"; do
  wall=$(awk '{print $1}' "$work/$name.times" | sort -n | sed -n $(((rounds + 1) / 2))p)
  cpu=$(awk '{print $2 + $3}' "$work/$name.times" | sort -n | sed -n $(((rounds + 1) / 2))p)
  printf '%-20s %8s %8s %14s\n' "$name" "$wall" "$cpu" "$(size "$name")"
done
