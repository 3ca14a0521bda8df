//! What archives can say: numbers, names, attributes, types.

use layerpack_erofs::FileType;
use layerpack_fixtures::tar::{Header, TarWriter, kind};

use crate::support::{ArchiveFile, base, memory_store, options, refused, try_tar};

#[test]
fn numbers_of_any_size() {
    let mut tar = TarWriter::new();
    tar.entry(
        &Header::new(kind::FILE, "octal")
            .mode(0o7777)
            .owner(0o7_777_777, 1)
            .mtime(0o77_777_777_777),
        b"",
    );
    tar.entry(
        &Header::new(kind::FILE, "binary")
            .owner(u32::MAX - 1, 2_097_152)
            .mtime(-100),
        b"",
    );
    tar.pax(&[
        ("uid", "4294967294"),
        ("gid", "3000000000"),
        ("mtime", "-1.000000001"),
    ]);
    tar.entry(&Header::new(kind::FILE, "pax").owner(7, 7).mtime(7), b"");
    tar.pax(&[("mtime", "1700000000.123456789123")]);
    tar.entry(&Header::new(kind::FILE, "nanos"), b"");
    tar.pax(&[("mtime", "99999999999.5")]);
    tar.entry(&Header::new(kind::FILE, "far"), b"");
    let tree = base(tar.finish()).tree();
    let node = tree.get("octal");
    assert_eq!(
        (node.mode, node.uid, node.gid, node.mtime),
        (0o7777, 2_097_151, 1, (8_589_934_591, 0))
    );
    let node = tree.get("binary");
    assert_eq!(
        (node.uid, node.gid, node.mtime),
        (u32::MAX - 1, 2_097_152, (-100, 0))
    );
    let node = tree.get("pax");
    assert_eq!(
        (node.uid, node.gid, node.mtime),
        (u32::MAX - 1, 3_000_000_000, (-2, 999_999_999))
    );
    assert_eq!(tree.get("nanos").mtime, (1_700_000_000, 123_456_789));
    assert_eq!(tree.get("far").mtime, (99_999_999_999, 500_000_000));
}

#[test]
fn types_and_device_numbers() {
    let mut tar = TarWriter::new();
    tar.entry(
        &Header::new(kind::CHAR, "char").device(4095, 1_048_575),
        b"",
    );
    tar.entry(
        &Header::new(kind::BLOCK, "block").device(8, 1).mode(0o660),
        b"",
    );
    tar.entry(&Header::new(kind::FIFO, "fifo"), b"");
    tar.symlink("link", "../outside/\u{1}");
    tar.entry(&Header::new(0, "v7"), b"old");
    tar.entry(&Header::new(0, "v7dir/"), b"");
    tar.entry(&Header::new(b'7', "contiguous"), b"data");
    // GNU's directory with a listing for incremental restores, and a volume's label.
    tar.entry(&Header::new(b'D', "dump/"), b"Yname\0\0");
    tar.entry(&Header::new(b'V', "label"), b"");
    tar.file("after", "found");
    let tree = base(tar.finish()).tree();
    assert_eq!(
        (tree.get("char").kind, tree.get("char").rdev),
        (FileType::CharDevice, Some((4095, 1_048_575)))
    );
    assert_eq!(
        (tree.get("block").kind, tree.get("block").rdev),
        (FileType::BlockDevice, Some((8, 1)))
    );
    assert_eq!(tree.get("fifo").kind, FileType::Fifo);
    assert_eq!(tree.get("link").target, b"../outside/\x01");
    assert_eq!(tree.get("v7").content(), b"old");
    assert_eq!(tree.get("v7dir").kind, FileType::Directory);
    assert_eq!(tree.get("contiguous").content(), b"data");
    assert_eq!(tree.get("dump").kind, FileType::Directory);
    assert!(!tree.has("label"));
    assert_eq!(tree.get("after").content(), b"found");
}

#[test]
fn pax_records_beat_fields_and_the_last_header_counts() {
    let mut tar = TarWriter::new();
    tar.pax(&[
        ("path", "lost"),
        ("uid", "1"),
        ("SCHILY.xattr.user.lost", "1"),
    ]);
    tar.pax(&[("path", "kept"), ("size", "5")]);
    tar.member(
        &{
            let mut header = Header::new(kind::FILE, "field");
            header.size = 0;
            header
        },
        b"",
    );
    let mut bytes = tar.into_unfinished();
    let mut data = b"12345".to_vec();
    data.resize(512, 0);
    bytes.extend_from_slice(&data);
    bytes.resize(bytes.len() + 1024, 0);
    let tree = base(bytes).tree();
    assert_eq!(tree.paths(), ["", "kept"]);
    let node = tree.get("kept");
    assert_eq!((node.content(), node.uid), (b"12345".to_vec(), 0));
    assert!(node.xattrs.is_empty());
}

#[test]
fn global_records_hold_until_replaced_and_empty_values_take_back() {
    let mut tar = TarWriter::new();
    // What git archives begin with.
    tar.pax_global(&[("comment", "0123456789abcdef")]);
    tar.pax_global(&[("uid", "9"), ("mtime", "12.5")]);
    tar.file("a", "1");
    tar.pax(&[("uid", "8"), ("mtime", "")]);
    tar.entry(&Header::new(kind::FILE, "b").mtime(77), b"2");
    tar.pax_global(&[("uid", "")]);
    tar.entry(&Header::new(kind::FILE, "c").owner(3, 0), b"3");
    let tree = base(tar.finish()).tree();
    assert_eq!(
        (tree.get("a").uid, tree.get("a").mtime),
        (9, (12, 500_000_000))
    );
    assert_eq!((tree.get("b").uid, tree.get("b").mtime), (8, (77, 0)));
    assert_eq!(
        (tree.get("c").uid, tree.get("c").mtime),
        (3, (12, 500_000_000))
    );
}

#[test]
fn names_of_any_bytes_and_lengths() {
    let long = vec!["n".repeat(255); 40].join("/");
    let mut tar = TarWriter::new();
    tar.file(b"bytes-\xff\xfe\n\\", "1");
    tar.file(format!("{}/x", "d".repeat(250)), "2");
    tar.file(&long, "3");
    tar.pax(&[("path", &vec!["p".repeat(255); 36].join("/"))]);
    tar.file("short", "4");
    let mut header = Header::new(kind::FILE, "tail");
    header.prefix = b"pre/fix".to_vec();
    tar.entry(&header, b"5");
    // GNU headers have other things where POSIX has the prefix.
    let mut header = Header::new(kind::FILE, "gnu").gnu();
    header.prefix = b"not a prefix".to_vec();
    tar.entry(&header, b"6");
    tar.symlink("long-link", vec![b't'; 4095]);
    let tree = base(tar.finish()).tree();
    assert_eq!(tree.nodes[&b"bytes-\xff\xfe\n\\"[..]].content(), b"1");
    assert_eq!(tree.get(&long).content(), b"3");
    assert_eq!(
        tree.get(&vec!["p".repeat(255); 36].join("/")).content(),
        b"4"
    );
    assert_eq!(tree.get("pre/fix/tail").content(), b"5");
    assert_eq!(tree.get("gnu").content(), b"6");
    assert_eq!(tree.get("long-link").target.len(), 4095);

    let mut tar = TarWriter::new();
    tar.file("c".repeat(256), "");
    assert!(refused(tar.finish()).contains("255"));
    let mut tar = TarWriter::new();
    tar.symlink("too-long", vec![b't'; 4096]);
    assert!(refused(tar.finish()).contains("too-long"));
    let mut tar = TarWriter::new();
    tar.symlink("empty", "");
    assert!(refused(tar.finish()).contains("empty"));
}

#[test]
fn thousands_of_nested_directories() {
    let path = vec!["d"; 3000].join("/");
    let mut tar = TarWriter::new();
    tar.file(&path, "deep");
    let packed = base(tar.finish());
    assert_eq!(packed.tree().get(&path).content(), b"deep");
    let mut tar = TarWriter::new();
    tar.file(vec!["d"; 40_000].join("/"), "deep");
    assert!(refused(tar.finish()).contains("--max-depth"));
}

#[test]
fn attributes_are_only_what_is_prefixed_and_allowed() {
    let big = vec![b'v'; 65_535];
    let mut tar = TarWriter::new();
    tar.pax(&[
        (&b"SCHILY.xattr.user.plain"[..], &b"value\n\0=\xff"[..]),
        (b"SCHILY.xattr.user.empty", b""),
        (b"SCHILY.xattr.user.big", &big),
        (b"LIBARCHIVE.xattr.user.a%3Db", b"AAEC"),
        (
            b"SCHILY.xattr.security.capability",
            &layerpack_fixtures::trees::capability_xattr(1 << 10, 0, true),
        ),
        (
            b"SCHILY.xattr.security.selinux",
            b"system_u:object_r:etc_t:s0\0",
        ),
        (b"SCHILY.xattr.trusted.secret", b"1"),
        (b"SCHILY.xattr.trusted.overlay.opaque", b"y"),
        (b"SCHILY.xattr.user.overlay.redirect", b"/etc"),
        (b"user.not", b"an attribute"),
        (b"SCHILY.xattr.", b"without a name"),
        (
            b"SCHILY.acl.access",
            b"user::rw-,user:1000:r--,group::r--,mask::r--,other::---",
        ),
    ]);
    tar.file("f", "");
    tar.pax(&[
        ("SCHILY.xattr.trusted.overlay.opaque", "y"),
        ("SCHILY.acl.default", "u::rwx,g::rx,u:joe:rwx,o::-"),
        // The kernel would refuse every access to a file with these.
        ("SCHILY.xattr.system.posix_acl_access", "zz"),
        ("SCHILY.xattr.security.capability", "zz"),
    ]);
    tar.dir("d/", 0o755);
    let packed = base(tar.finish());
    let tree = packed.tree();
    let names: Vec<_> = tree
        .get("f")
        .xattrs
        .keys()
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect();
    assert_eq!(
        names,
        [
            "security.capability",
            "system.posix_acl_access",
            "user.a=b",
            "user.big",
            "user.empty",
            "user.plain"
        ]
    );
    let node = tree.get("f");
    assert_eq!(node.xattrs[&b"user.plain"[..]], b"value\n\0=\xff");
    assert_eq!(node.xattrs[&b"user.big"[..]], big);
    assert_eq!(node.xattrs[&b"user.a=b"[..]], [0, 1, 2]);
    assert!(tree.get("d").xattrs.is_empty());
    let warnings = packed.warnings.join("\n");
    for part in [
        "trusted.overlay.opaque of f",
        "user.overlay.redirect of f",
        "trusted.overlay.opaque of d",
        "ACL of d",
        "dropped attribute system.posix_acl_access of d/: its value",
        "dropped attribute security.capability of d/: its value",
    ] {
        assert!(warnings.contains(part), "{part} not in {warnings}");
    }
    let selinux: Vec<_> = packed
        .warnings
        .iter()
        .filter(|line| line.contains("selinux"))
        .collect();
    assert_eq!(selinux.len(), 1, "{warnings}");
    assert!(selinux[0].contains("--xattr security.selinux"));

    let mut tar = TarWriter::new();
    tar.pax(&[(&b"SCHILY.xattr.user.huge"[..], &vec![b'v'; 65_536][..])]);
    tar.file("named-file", "");
    let message = refused(tar.finish());
    assert!(
        message.contains("named-file") && message.contains("65536"),
        "{message}"
    );
}

#[test]
fn files_beyond_8_gib_in_the_header() {
    // The size is in base-256; the data is a hole.
    let mut tar = TarWriter::new();
    let size = (9u64 << 30) + 5;
    tar.sparse_pax_1_0("big", &[(size - 5, 5)], size, b"tail!");
    tar.sparse_gnu("old", &[(0, 1), (size - 5, 5)], size, b"htail!");
    let tree = base(tar.finish()).tree();
    let node = tree.get("big");
    assert_eq!(node.size, size);
    assert_eq!(
        node.pieces.last().unwrap().1.len() as u64 + node.pieces.last().unwrap().0,
        size
    );
    assert!(node.pieces.last().unwrap().1.ends_with(b"tail!"));
    assert!(node.stored() <= 8192);
    assert_eq!(tree.get("old").size, size);
}

#[test]
fn limits_are_named() {
    use layerpack_packer::{Silent, build};
    let mut tar = TarWriter::new();
    for index in 0..20 {
        tar.file(format!("f{index}"), vec![1; 4096]);
    }
    let file = crate::support::ArchiveFile::new(tar.finish());
    let store = crate::support::memory_store();
    type Change = fn(&mut layerpack_packer::Limits);
    let cases: [(&str, Change); 3] = [
        ("--max-entries", |limits| limits.max_entries = 19),
        ("--max-bytes", |limits| limits.max_bytes = 50_000),
        ("--max-path", |limits| limits.max_path = 2),
    ];
    for (name, change) in cases {
        let mut options = crate::support::options("base/a:1", file.source());
        change(&mut options.limits);
        let error = build(&store, &options, &Silent).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let options = crate::support::options("base/a:1", file.source());
    build(&store, &options, &Silent).unwrap();
    // A bomb of one huge extended header, and one of many.
    let mut tar = TarWriter::new();
    let mut header = Header::new(kind::PAX, "x");
    header.size = 1 << 40;
    tar.member(&header, b"");
    assert!(refused(tar.finish()).contains("which no option raises"));
    let mut tar = TarWriter::new();
    for index in 0..40 {
        tar.pax_global(&[(format!("key{index}"), "v".repeat(1 << 19))]);
    }
    assert!(refused(tar.finish()).contains("which no option raises"));
}

#[test]
fn a_layer_of_nothing_but_directories_and_links_exists() {
    let mut tar = TarWriter::new();
    tar.dir("empty/", 0o711);
    tar.symlink("link", "target");
    tar.file("no-bytes", "");
    let packed = base(tar.finish());
    assert_eq!(packed.map.data_size(), 0);
    assert_eq!(packed.tree().get("empty").mode, 0o711);
    // And one of a root alone; an archive without any entry is taken for a mistake.
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    let packed = try_tar("toolkit/nothing:1", tar.finish()).unwrap();
    assert_eq!(packed.tree().paths(), [""]);
    let error = try_tar("toolkit/nothing:2", TarWriter::new().finish())
        .err()
        .unwrap();
    assert!(
        matches!(error, layerpack_packer::PackError::EmptyArchive { .. }),
        "{error}"
    );
}

#[test]
fn attributes_that_are_not_kept_are_counted() {
    let mut tar = TarWriter::new();
    for name in ["a", "b", "c"] {
        tar.pax(&[
            ("SCHILY.xattr.trusted.t", "1"),
            ("SCHILY.xattr.user.kept", "1"),
        ]);
        tar.file(name, "");
    }
    assert_eq!(
        base(tar.finish()).warnings,
        ["dropped attribute trusted.t of 3 entries; to keep it, build with --xattr trusted.t"]
    );
}

#[test]
fn an_owner_of_minus_one_is_refused() {
    let mut by_header = TarWriter::new();
    by_header.entry(&Header::new(kind::FILE, "sub/odd").owner(u32::MAX, 0), b"");
    let mut by_record = TarWriter::new();
    by_record.pax(&[("gid", "4294967295")]);
    by_record.dir("sub/odd", 0o755);
    for (tar, part) in [(by_header, "user id"), (by_record, "group id")] {
        let error = refused(tar.finish());
        for part in ["sub/odd", part, "4294967295", "exclude it"] {
            assert!(error.contains(part), "{part} not in {error}");
        }
    }
}

/// Keeps the warnings that it is told.
#[derive(Default)]
struct Told(std::sync::Mutex<Vec<String>>);

impl layerpack_packer::Progress for Told {
    fn warning(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

#[test]
fn a_build_that_fails_tells_its_warnings() {
    let mut tar = TarWriter::new();
    tar.file("../up", "");
    tar.entry(&Header::new(kind::FILE, "odd").owner(u32::MAX, 0), b"");
    let archive = ArchiveFile::new(tar.finish());
    let told = Told::default();
    let with = options("base/a:1", archive.source());
    layerpack_packer::build(&memory_store(), &with, &told).unwrap_err();
    let told = told.0.into_inner().unwrap();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("../up"), "{told:?}");
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    let good = ArchiveFile::new(tar.finish());
    let quiet = Told::default();
    let with = options("base/a:1", good.source());
    layerpack_packer::build(&memory_store(), &with, &quiet).unwrap();
    assert!(quiet.0.into_inner().unwrap().is_empty());
}
