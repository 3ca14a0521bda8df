//! The far ends of what a layer may hold: wide and deep directories, long paths, large attributes,
//! loops of links.

use layerpack_erofs::FileType;
use layerpack_fixtures::tar::{Header, TarWriter, kind};

use crate::support::{base, refused, try_tar, upper};

/// `cargo xtask test --full` asks for more; the default keeps a build without optimisation short.
pub fn entries() -> u64 {
    if *layerpack_fixtures::trees::seeds().end() > 10 {
        1_000_000
    } else {
        100_000
    }
}

#[test]
fn a_directory_of_very_many_entries() {
    let count = entries();
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).dir("wide/", 0o755);
    let mut header = Header::new(kind::FILE, "wide/").mode(0o644).to_bytes();
    for index in 0..count {
        // Only the name and the checksum differ.
        let name = format!("wide/{:07}", index * 7919 % count);
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        tar.raw(&header);
    }
    let packed = base(tar.finish());
    assert_eq!(packed.manifest.counts.files, count);
    let image = layerpack_erofs::Image::open(&packed.meta).unwrap();
    let wide = image.resolve(b"wide").unwrap().unwrap();
    let names: Vec<Vec<u8>> = image
        .read_dir(&wide)
        .unwrap()
        .map(|entry| entry.unwrap().name.to_vec())
        .collect();
    assert_eq!(names.len() as u64, count);
    assert!(names.is_sorted());
    for index in [0, 1, count / 2, count - 1] {
        let name = format!("{index:07}");
        assert!(image.lookup(&wide, name.as_bytes()).unwrap().is_some());
    }
    assert!(image.lookup(&wide, b"9999999x").unwrap().is_none());
}

#[test]
fn paths_of_nine_thousand_bytes_and_three_thousand_directories() {
    let long = vec!["l".repeat(250); 36].join("/");
    let deep = vec!["d"; 3000].join("/");
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    tar.file(format!("{long}/file"), "long");
    tar.file(format!("{deep}/file"), "deep");
    tar.hard_link(format!("{long}/linked"), format!("{deep}/file"));
    tar.symlink(format!("{deep}/symlink"), &long[..4095]);
    let bytes = tar.finish();
    for tree in [base(&bytes).tree(), upper(&bytes).tree()] {
        assert!(long.len() > 9000 && deep.len() == 5999);
        assert_eq!(tree.get(&format!("{long}/file")).content(), b"long");
        assert_eq!(tree.get(&format!("{deep}/file")).nlink, 2);
        assert_eq!(tree.get(&format!("{deep}/symlink")).target.len(), 4095);
    }
    // Whiteouts and marks at the far end of both.
    let mut tar = TarWriter::new();
    tar.whiteout(&long, "gone").opaque(&deep);
    let tree = upper(tar.finish()).tree();
    assert!(tree.is_whiteout(&format!("{long}/gone")) && tree.is_opaque(&deep));
}

#[test]
fn attributes_up_to_the_limit_and_beyond() {
    let with = |len: usize, kind_of: u8| {
        let mut tar = TarWriter::new();
        let value = "v".repeat(len);
        tar.pax(&[("SCHILY.xattr.user.long", value.as_str())]);
        let header = Header::new(kind_of, "entry").link("target").device(1, 3);
        tar.entry(&header, b"");
        tar.finish()
    };
    for kind_of in [kind::FILE, kind::DIR, kind::SYMLINK, kind::FIFO, kind::CHAR] {
        for len in [0, 1, 4000, 4096, 65_535] {
            let tree = base(with(len, kind_of)).tree();
            let value = &tree.get("entry").xattrs[&b"user.long"[..]];
            assert_eq!(value.len(), len);
        }
        let message = refused(with(65_536, kind_of));
        assert!(
            message.contains("user.long") && message.contains("entry"),
            "{message}"
        );
    }
    // Many at once, each of its own value.
    let mut tar = TarWriter::new();
    let records: Vec<(String, String)> = (0..200)
        .map(|index| {
            (
                format!("SCHILY.xattr.user.n{index}"),
                format!("{index}").repeat(100),
            )
        })
        .collect();
    tar.pax(&records);
    tar.file("many", "");
    assert_eq!(base(tar.finish()).tree().get("many").xattrs.len(), 200);
}

#[test]
fn loops_of_links_end() {
    for links in [
        &[("a", "a")][..],
        &[("a", "b"), ("b", "a")],
        &[("a", "b/x"), ("b", "a/y")],
        &[("a", "./../a/a")],
    ] {
        let mut tar = TarWriter::new();
        for (name, target) in links {
            tar.symlink(*name, *target);
        }
        // As links they are as good as any.
        let tree = base(tar.clone().finish()).tree();
        assert_eq!(tree.get("a").kind, FileType::Symlink);
        tar.file("a/file", "");
        let message = refused(tar.finish());
        assert!(message.contains("loop"), "{message}");
    }
    // Hard links that name each other: neither is there before the other.
    let mut tar = TarWriter::new();
    tar.hard_link("a", "b").hard_link("b", "a");
    assert!(refused(tar.finish()).contains('b'));
    let mut tar = TarWriter::new();
    tar.hard_link("a", "a");
    assert!(refused(tar.finish()).contains('a'));
    // Links that grow with every step.
    let mut tar = TarWriter::new();
    for index in 0..60 {
        let next = format!("/l{0}/../l{0}", index + 1);
        tar.symlink(format!("l{index}"), next);
    }
    tar.file("l0/file", "");
    assert!(refused(tar.finish()).contains("loop"));
}

#[test]
fn nothing_but_links_or_empty_directories_is_a_layer() {
    let mut links = TarWriter::new();
    links.symlink("a", "b").symlink("d/e", "/nowhere");
    let mut directories = TarWriter::new();
    directories.dir("x/", 0o700).dir("y/z/", 0o711);
    let mut marks = TarWriter::new();
    marks.whiteout("", "gone").opaque("d");
    for (tar, paths) in [
        (links, &["", "a", "d", "d/e"][..]),
        (directories, &["", "x", "y", "y/z"]),
        (marks, &["", "d", "gone"]),
    ] {
        let packed = upper(tar.finish());
        assert_eq!(packed.tree().paths(), paths);
        assert_eq!(packed.map.data_size(), 0);
    }
    assert!(try_tar("base/a:1", TarWriter::new().finish()).is_err());
}
