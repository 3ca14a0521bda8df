//! `layerpack-fuzz TARGET SECONDS SEEDS FOUND`: a plain mutation fuzzer, for where libFuzzer cannot
//! be had. Reads the files of the folder SEEDS, and writes an input that makes the target panic to
//! the folder FOUND. `layerpack-fuzz --write-seeds DIR` writes all seeds; `--list` lists targets.
#![allow(clippy::print_stdout, reason = "a command line tool prints")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use layerpack_fixtures::rng::Rng;
use layerpack_fuzz::{TARGETS, find, mutate, seeds};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["--list"] => {
            TARGETS
                .iter()
                .for_each(|target| println!("{}", target.name));
            Ok(())
        }
        ["--write-seeds", dir] => write_seeds(Path::new(dir)),
        [target, seconds, seeds, found] => {
            fuzz(target, seconds, Path::new(seeds), Path::new(found))
        }
        _ => Err(
            "usage: layerpack-fuzz TARGET SECONDS SEEDS FOUND | --write-seeds DIR | --list"
                .to_owned(),
        ),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write_seeds(dir: &Path) -> Result<(), String> {
    for target in TARGETS {
        let folder = dir.join(target.name);
        fs_err::create_dir_all(&folder).map_err(|error| error.to_string())?;
        for (name, bytes) in seeds(target.name) {
            fs_err::write(folder.join(name), bytes).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

fn fuzz(name: &str, seconds: &str, seeds: &Path, found: &Path) -> Result<(), String> {
    let target = find(name).ok_or_else(|| format!("there is no target {name}"))?;
    let seconds = seconds
        .parse()
        .map_err(|_| format!("{seconds} is no number of seconds"))?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut inputs = Vec::new();
    let mut files: Vec<_> = fs_err::read_dir(seeds)
        .map_err(|error| error.to_string())?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .collect();
    files.sort();
    for file in files {
        inputs.push(fs_err::read(file).map_err(|error| error.to_string())?);
    }
    // The clock: two runs shall not try the same.
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let mut rng = Rng::new(seed);
    let mut runs = 0u64;
    let mut next = inputs.clone();
    while Instant::now() < end || !next.is_empty() {
        let input = next.pop().unwrap_or_else(|| mutate(&mut rng, &inputs));
        runs += 1;
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
            fs_err::create_dir_all(found).map_err(|error| error.to_string())?;
            let path = found.join(format!("{name}-{seed}-{runs}"));
            fs_err::write(&path, &input).map_err(|error| error.to_string())?;
            return Err(format!("{name} panics on {}", path.display()));
        }
    }
    println!("{name}: {runs} inputs, no panic");
    Ok(())
}
