//! Time and peak memory of a million entries: `million tree` in directories of 20, `million
//! directory` all in one. Times are of one run; compare runs of one machine only.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::error::Error;
use std::time::Instant;

use layerpack_erofs::{
    BlockIndex, FileData, FileLayout, Image, Metadata, NodeId, NodeKind, Timestamp, Tree,
    WriteOptions, check, write_image,
};

const ENTRIES: u32 = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let flat = match std::env::args().nth(1).as_deref() {
        Some("tree") => false,
        Some("directory") => true,
        _ => return Err("say \"tree\" or \"directory\"".into()),
    };
    let start = Instant::now();
    let tree = build(flat)?;
    report("build", start)?;
    let options = WriteOptions {
        data_blocks: u64::from(ENTRIES),
        device_tag: [b'x'; 64],
        uuid: Some([1; 16]),
        ..WriteOptions::default()
    };
    let start = Instant::now();
    let info = write_image(&tree, &options, &mut std::io::sink())?;
    report("write", start)?;
    println!("{} bytes, {} inodes", info.bytes, info.inodes);
    let mut bytes = Vec::new();
    write_image(&tree, &options, &mut bytes)?;
    drop(tree);
    let start = Instant::now();
    let image = Image::open(&bytes)?;
    let tree = Tree::from_image(&image)?;
    report("read back", start)?;
    drop(tree);
    let start = Instant::now();
    if let Some(problem) = check(&bytes).first() {
        return Err(problem.to_string().into());
    }
    report("check", start)
}

/// Entries come in no order, as from a directory or a tar.
fn build(flat: bool) -> Result<Tree, Box<dyn Error>> {
    let metadata = |number: u32| Metadata {
        mode: 0o644,
        mtime: Timestamp {
            sec: 1_700_000_000 + i64::from(number % 1000),
            nsec: 0,
        },
        ..Metadata::default()
    };
    let mut tree = Tree::new(metadata(0));
    let mut parent = NodeId::ROOT;
    for number in 0..ENTRIES {
        let scattered = number.wrapping_mul(0x9e37_79b1);
        if !flat && number % 20 == 0 {
            let name = format!("directory-{scattered:x}");
            parent = tree.insert(
                NodeId::ROOT,
                name.as_bytes(),
                metadata(0),
                NodeKind::Directory,
            )?;
        }
        let start = BlockIndex::new(u64::from(number)).ok_or("too many blocks")?;
        let data = FileData {
            size: 100,
            layout: FileLayout::Contiguous { start },
        };
        let name = format!("file-{scattered:x}");
        tree.insert(
            parent,
            name.as_bytes(),
            metadata(number),
            NodeKind::File(data),
        )?;
    }
    Ok(tree)
}

fn report(step: &str, start: Instant) -> Result<(), Box<dyn Error>> {
    let seconds = start.elapsed().as_secs_f64();
    let status = fs_err::read_to_string("/proc/self/status")?;
    let peak = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap_or_default();
    println!(
        "{step:10} {seconds:6.2} s, peak so far {}",
        peak.trim_start_matches("VmHWM:").trim()
    );
    Ok(())
}
