//! Tools of erofs-utils as referees: `fsck.erofs` on our images, our reader on images of
//! `mkfs.erofs`.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

use layerpack_erofs::{Image, check};
use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::trees::TreeMaker;
use layerpack_fixtures::{ScratchDir, find_tool, skip};
use rustix::fs::FileType;

use crate::common::{Sample, assert_same, of_image};
use crate::kernel::store;
use crate::trees::limits;

/// Has `fsck.erofs` check the `meta` and `data` files in a directory, if it is installed.
pub(crate) fn fsck(sample: &Sample, dir: &Path) -> bool {
    let Some(tool) = find_tool("fsck.erofs") else {
        return false;
    };
    let mut command = Command::new(tool);
    command.arg("-d3"); // says so when all is well
    if sample.data_blocks > 0 {
        command.arg(format!("--device={}", dir.join("data").display()));
    }
    let output = command.arg(dir.join("meta")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("No errors found") && !text.contains("<E>"),
        "{text}"
    );
    true
}

#[test]
fn fsck_accepts_limits() {
    let sample = limits(false);
    let dir = ScratchDir::new("erofs-fsck").unwrap();
    store(&sample, dir.path());
    if !fsck(&sample, dir.path()) {
        skip!("fsck.erofs is not installed (package erofs-utils)");
    }
}

/// `fsck.erofs` must notice damage, or the tests that rely on it show nothing.
#[test]
fn fsck_notices_damage() {
    let sample = limits(false);
    let dir = ScratchDir::new("erofs-fsck-damage").unwrap();
    let Some(tool) = find_tool("fsck.erofs") else {
        skip!("fsck.erofs is not installed (package erofs-utils)");
    };
    let mut bytes = sample.image();
    bytes[1024 + 36] ^= 1;
    fs_err::write(dir.join("meta"), &bytes).unwrap();
    let status = Command::new(tool)
        .arg(dir.join("meta"))
        .output()
        .unwrap()
        .status;
    assert!(!status.success());
}

/// What the version in Debian 12 gets right: no names of 255 bytes, for one.
fn fill(mut maker: TreeMaker) -> layerpack_fixtures::Result<()> {
    maker
        .dir("many", 0o755)?
        .dir("empty", 0o1777)?
        .dir("shared", 0o700)?;
    for size in [0, 1, 59, 4000, 4095, 4096, 4097, 8192, 50_000] {
        maker.file(format!("size-{size}"), crate::trees::bytes(size, size))?;
    }
    maker
        .file("size-1", b"2")?
        .mtime("size-1", -5, 999_999_999)?
        .mode("size-1", 0o4755)?;
    for number in 0..500 {
        let path = format!("many/a-longer-name-{number}");
        maker
            .file(&path, [])?
            .mtime(&path, 1_600_000_000 + number, 1)?;
    }
    for number in 0..20 {
        let path = format!("shared/{number}");
        maker
            .file(&path, b"x")?
            .xattr(&path, "user.same", vec![7; 300])?;
        maker.xattr(&path, format!("user.{number}"), [1])?;
    }
    for len in [1, 100, 4000] {
        maker.symlink(format!("link-{len}"), vec![b'l'; len])?;
    }
    maker.sparse("sparse", 100_000, &[(50_000, b"data")])?;
    maker
        .hard_link("many/hard", "size-4095")?
        .hard_link("hard", "link-100")?;
    maker
        .node("fifo", FileType::Fifo, (0, 0))?
        .node("socket", FileType::Socket, (0, 0))?;
    maker.finish()
}

#[test]
fn reader_agrees_with_mkfs() {
    let Some(tool) = find_tool("mkfs.erofs") else {
        skip!("mkfs.erofs is not installed (package erofs-utils)");
    };
    for chunked in [false, true] {
        let dir = ScratchDir::new("erofs-mkfs").unwrap();
        let source = dir.mkdir("source").unwrap();
        fill(TreeMaker::new(&source)).unwrap();
        let mut command = Command::new(&tool);
        if chunked {
            fs_err::write(dir.join("blob"), b"").unwrap();
            command.arg(format!("--blobdev={}", dir.join("blob").display()));
            command.arg("--chunksize=4096");
        }
        let output = command
            .arg(dir.join("image"))
            .arg(&source)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let bytes = fs_err::read(dir.join("image")).unwrap();
        let blob = if chunked {
            fs_err::read(dir.join("blob")).unwrap()
        } else {
            vec![]
        };
        let image = Image::open(&bytes).unwrap();
        let options = Options {
            contents: false,
            ..Options::default()
        };
        assert_same(
            &treecmp::snapshot(&source, &options).unwrap(),
            &of_image(&image),
        );
        let tree_files = of_image(&image).entries.into_iter();
        for (path, _) in tree_files.filter(|(_, entry)| entry.kind.is_file()) {
            let expected = fs_err::read(source.join(std::ffi::OsStr::from_bytes(&path))).unwrap();
            let inode = image.resolve(&path).unwrap().unwrap();
            let mut found = Vec::new();
            for extent in image.layout(&inode).unwrap() {
                let extent = extent.unwrap();
                match extent.place {
                    None => found.resize(found.len() + extent.len as usize, 0),
                    Some(place) => {
                        let device = if place.device == 0 { &bytes } else { &blob };
                        let at = place.address as usize;
                        found.extend_from_slice(&device[at..at + extent.len as usize]);
                    }
                }
            }
            assert!(found == expected, "{path:?}");
        }
        // Debian 12's version says nothing of its devices but their number.
        let problems = check(&bytes).into_iter().filter(|problem| {
            !problem.what.contains("has no tag") && !problem.what.contains("has no size")
        });
        assert_eq!(problems.collect::<Vec<_>>(), vec![]);
    }
}
