//! Writes the files below a directory in several shapes of frames and chunks, and says what each
//! costs: `frames DIRECTORY TOUCHED SCRATCH [quick]`. TOUCHED lists files, relative to the
//! directory, that a reader takes whole. Prints one line of tab-separated numbers for each shape:
//! frame KiB, chunk sizes, MB stored, share of unique bytes, dedupe ratio, processor seconds,
//! MB fetched, frames fetched, frames for each file touched.

#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_store::chunker::Params;
use layerpack_store::{
    Digest, Draft, Extent, FileStore, LayerStore, MapBuilder, Reference, WriterOptions,
};

/// Frames in KiB, chunks as least, average, most and whole in KiB.
const SHAPES: [(usize, [usize; 4]); 9] = [
    (64, [16, 64, 256, 64]),
    (128, [16, 64, 256, 64]),
    (256, [16, 64, 256, 64]),
    (512, [16, 64, 256, 64]),
    (1024, [16, 64, 256, 64]),
    (128, [8, 32, 128, 32]),
    (128, [32, 128, 512, 128]),
    (256, [32, 128, 512, 128]),
    (256, [64, 256, 1024, 256]),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [root, touched, scratch, rest @ ..] = arguments.as_slice() else {
        return Err("usage: frames DIRECTORY TOUCHED SCRATCH [quick]".into());
    };
    let touched: HashSet<PathBuf> = fs_err::read_to_string(touched)?
        .lines()
        .map(|path| root.join(path))
        .collect();
    let files = files(root)?;
    let shapes = match rest.is_empty() {
        true => SHAPES.as_slice(),
        false => SHAPES.get(..2).unwrap_or_default(),
    };
    for (frame, chunks) in shapes {
        let line = shape(&files, &touched, scratch, *frame, *chunks)?;
        println!("{line}");
        fs_err::remove_dir_all(scratch)?;
    }
    Ok(())
}

/// Files with bytes in the order of a layer: small ones first; the files of a directory by name,
/// then its directories; each inode once.
fn files(root: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    use std::os::unix::fs::MetadataExt as _;
    let mut seen = HashSet::new();
    let (mut small, mut large) = (Vec::new(), Vec::new());
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        let mut entries = fs_err::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
        entries.sort_by_key(fs_err::DirEntry::file_name);
        let mut below = Vec::new();
        for entry in entries {
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                below.push(entry.path());
            } else if metadata.is_file()
                && metadata.len() > 0
                && seen.insert((metadata.dev(), metadata.ino()))
            {
                let group = if metadata.len() <= 4096 {
                    &mut small
                } else {
                    &mut large
                };
                group.push(entry.path());
            }
        }
        pending.extend(below.into_iter().rev());
    }
    small.append(&mut large);
    Ok(small)
}

fn shape(
    files: &[PathBuf],
    touched: &HashSet<PathBuf>,
    scratch: &Path,
    frame: usize,
    [min, avg, max, whole]: [usize; 4],
) -> Result<String, Box<dyn Error>> {
    let store = LayerStore::new(Arc::new(FileStore::new(scratch)?));
    let mut writer = store.writer(WriterOptions {
        frame: frame << 10,
        chunker: Params {
            min: min << 10,
            avg: avg << 10,
            max: max << 10,
            whole: whole << 10,
        },
        ..WriterOptions::default()
    })?;
    let before = processor_seconds()?;
    let mut wanted: Vec<Digest> = Vec::new();
    let mut places: HashMap<Digest, u64> = HashMap::new();
    let mut end = 0_u64;
    let mut extents = Vec::new();
    for path in files {
        let mut file = fs_err::File::open(path)?;
        let size = file.metadata()?.len();
        let added = writer.add_file(&mut file, size)?;
        for (digest, len) in added.chunks {
            if touched.contains(path) {
                wanted.push(digest);
            }
            places.entry(digest).or_insert_with(|| {
                extents.push(Extent {
                    data_offset: end,
                    len,
                    digest,
                });
                let place = end;
                end += u64::from(len).next_multiple_of(4096);
                place
            });
        }
    }
    let mut map = MapBuilder::new(end);
    for extent in extents {
        map.push(extent);
    }
    let reference: Reference = "base/frames:1".parse()?;
    let published = writer.finish(Draft::new(reference.clone(), vec![0; 4096], map.build()?))?;
    let processor = processor_seconds()? - before;
    let (_, manifest) = store.load(&reference)?;
    let map = store.map(&manifest)?;
    let locator = store.locator(&manifest, &map)?;
    let mut frames = HashSet::new();
    for digest in &wanted {
        let offset = places.get(digest).copied().unwrap_or_default();
        let extent = map.extents_in(offset..offset + 1).start;
        let (frame, _) = locator.extent(extent).ok_or("a chunk lies nowhere")?;
        frames.insert(frame);
    }
    let fetched: u64 = frames
        .iter()
        .filter_map(|frame| locator.frames().get(usize::try_from(*frame).ok()?))
        .map(|frame| u64::from(frame.stored_len))
        .sum();
    let stats = published.stats;
    let touched = files.iter().filter(|path| touched.contains(*path)).count();
    Ok([
        frame.to_string(),
        format!("{min}/{avg}/{max}/{whole}"),
        mega(stats.new_bytes),
        format!("{:.3}", float(stats.new_bytes) / float(stats.new_raw_bytes)),
        format!("{:.3}", float(stats.raw_bytes) / float(stats.new_raw_bytes)),
        format!("{processor:.2}"),
        mega(fetched),
        frames.len().to_string(),
        format!("{:.2}", float(frames.len() as u64) / float(touched as u64)),
    ]
    .join("\t"))
}

fn mega(bytes: u64) -> String {
    format!("{:.2}", float(bytes) / 1e6)
}

#[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Of this process, from the kernel's clock ticks of 1/100 s.
fn processor_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = fs_err::read_to_string("/proc/self/stat")?;
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u32 = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|number| number.parse::<u32>().ok())
        .sum();
    Ok(f64::from(ticks) / 100.0)
}
