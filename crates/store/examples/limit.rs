//! What building cannot be faster than: cutting, hashing and compressing the files below a
//! directory, already in memory, on all cores. Prints seconds of wall and of processor time.
//!
//! The same chunker, digest and zstd level as a build, frames gathered as there, and nothing
//! else: no files opened, no names, nothing deduplicated, nothing written.

#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use layerpack_store::chunker::{Params, cut};
use layerpack_store::{Digest, WriterOptions};
use zstd_safe::CCtx;

fn main() -> Result<(), Box<dyn Error>> {
    let root = std::env::args_os().nth(1).ok_or("usage: limit DIRECTORY")?;
    let mut files = Vec::new();
    let mut pending = vec![PathBuf::from(root)];
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() {
                files.push(fs_err::read(entry.path())?);
            }
        }
    }
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let threads = std::thread::available_parallelism()?.get();
    let before = processor_seconds()?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                if let Err(error) = work(&files, &next)
                    && let Ok(mut failed) = failed.lock()
                {
                    *failed = Some(error);
                }
            });
        }
    });
    let wall = started.elapsed().as_secs_f64();
    if let Ok(Some(error)) = failed.into_inner() {
        return Err(error.into());
    }
    println!("{wall:.4} {:.4}", processor_seconds()? - before);
    Ok(())
}

fn work(files: &[Vec<u8>], next: &AtomicUsize) -> Result<(), String> {
    let params = Params::default();
    let WriterOptions { level, frame, .. } = WriterOptions::default();
    let mut context = CCtx::create();
    let (mut gathered, mut out) = (Vec::new(), Vec::new());
    while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
        let mut rest = file.as_slice();
        while !rest.is_empty() {
            let len = match file.len() <= params.whole {
                true => rest.len(),
                false => cut(rest, &params),
            };
            let (chunk, others) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            std::hint::black_box(Digest::of(chunk));
            gathered.extend_from_slice(chunk);
            if gathered.len() >= frame {
                out.clear();
                out.reserve(zstd_safe::compress_bound(gathered.len()));
                context
                    .compress(&mut out, &gathered, level)
                    .map_err(|code| zstd_safe::get_error_name(code).to_owned())?;
                gathered.clear();
            }
            rest = others;
        }
    }
    Ok(())
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
