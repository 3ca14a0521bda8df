//! What layers mean on top of others, shown by the kernel, against what other tools make of the
//! same bytes: umoci of chains of layers, GNU tar of single archives, and the tree itself of a
//! difference.

use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::trees::{NastyOptions, RandomOptions, nasty, random};
use layerpack_fixtures::{ScratchDir, find_tool, skip};
use layerpack_packer::Source;

use crate::difference::difference;
use crate::merge::random_layer;
use crate::parents::{base_to_pass, pack_on, passing_layer};
use crate::peer::assert_same_as_mounted;
use crate::privileged_kernel::{assert_same_trees, stack, unable};
use crate::support::{ArchiveFile, Packed, memory_store, options, try_pack};

/// Unpacks layers with umoci; the root of what comes out.
pub fn umoci_unpack(umoci: &Path, scratch: &ScratchDir, layers: &[Vec<u8>]) -> PathBuf {
    let layout = scratch.join("image");
    let image = format!("{}:t", layout.display());
    let run = |args: &[&str]| {
        let output = Command::new(umoci).args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {text}");
    };
    run(&["init", "--layout", &layout.display().to_string()]);
    run(&["new", "--image", &image]);
    for (index, bytes) in layers.iter().enumerate() {
        let file = scratch.write(format!("layer-{index}.tar"), bytes).unwrap();
        let file = file.display().to_string();
        run(&["raw", "add-layer", "--image", &image, &file]);
    }
    let bundle = scratch.join("bundle");
    run(&["unpack", "--image", &image, &bundle.display().to_string()]);
    bundle.join("rootfs")
}

/// umoci leaves the times of directories that it changed later, and makes the root itself.
fn as_umoci() -> Options {
    Options {
        directory_times: false,
        ..Options::default().without_root()
    }
}

/// Packs layers, each on those below it.
fn chain_of(layers: &[TarWriter]) -> Vec<Packed> {
    let store = memory_store();
    let mut names: Vec<String> = Vec::new();
    let mut packed = Vec::new();
    for (index, tar) in layers.iter().enumerate() {
        let kind = if index == 0 { "base" } else { "toolkit" };
        let below: Vec<&str> = names.iter().map(String::as_str).collect();
        let name = format!("{kind}/l{index}:1");
        packed.push(pack_on(&store, &name, tar, &below));
        names.push(name);
    }
    packed
}

fn finished(layers: &[TarWriter]) -> Vec<Vec<u8>> {
    layers.iter().map(|tar| tar.clone().finish()).collect()
}

/// Layers that mean nothing without those below them: no directory of an upper one has an entry.
fn awkward_chain() -> Vec<TarWriter> {
    let mut base = TarWriter::new();
    base.dir("./", 0o755);
    for dir in ["tmp", "d", "d/e", "gone", "opaque", "again", "to-file"] {
        base.entry(
            &Header::new(kind::DIR, format!("{dir}/"))
                .mode(0o1753)
                .owner(3, 4),
            b"",
        );
        base.file(format!("{dir}/old"), format!("{dir} old"));
    }
    base.symlink("link", "d/e").symlink("abs", "/d/e");
    base.entry(&Header::new(kind::FIFO, "fifo"), b"");
    base.entry(&Header::new(kind::CHAR, "char").device(1, 3), b"");
    base.file("file", "linked").symlink("symlink", "file");
    base.file("to-dir", "a file").file("removed", "1");
    for name in ["file", "fifo", "char", "symlink"] {
        base.hard_link(format!("d/{name}-2"), name);
        base.hard_link(format!("{name}-3"), name);
    }
    let mut middle = TarWriter::new();
    middle.file("tmp/new", "1").file("d/e/f/g", "2");
    middle.file("link/through", "3").file("abs/through-2", "4");
    middle
        .whiteout("", "gone")
        .whiteout("", "removed")
        .whiteout("d", "never");
    middle.opaque("opaque").file("opaque/new", "5");
    middle
        .whiteout("", "again")
        .dir("again/", 0o700)
        .file("again/new", "6");
    middle
        .whiteout("", "to-dir")
        .dir("to-dir/", 0o711)
        .file("to-dir/in", "7");
    middle.whiteout("", "to-file").file("to-file", "now a file");
    // One name of three less, and one more.
    for name in ["file", "fifo", "char", "symlink"] {
        middle.whiteout("d", &format!("{name}-2"));
        middle.hard_link(format!("more/{name}-4"), format!("{name}-3"));
    }
    let mut top = TarWriter::new();
    top.file("gone/back", "8").file("removed", "again");
    top.whiteout("more", "file-4").whiteout("", "fifo");
    top.hard_link("more/char-5", "char-3");
    top.whiteout("d", "e").file("d/e/fresh", "9");
    top.file("tmp/new", "changed");
    vec![base, middle, top]
}

#[test]
fn privileged_a_chain_is_what_umoci_unpacks() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let Some(umoci) = find_tool("umoci") else {
        skip!("needs umoci")
    };
    let scratch = ScratchDir::new("chain").unwrap();
    let layers = awkward_chain();
    let unpacked = umoci_unpack(&umoci, &scratch, &finished(&layers));
    let packed = chain_of(&layers);
    let shown = stack(&packed.iter().collect::<Vec<_>>(), &scratch, "stack", None);
    // Link counts too, of every type.
    assert_same_trees(&unpacked, &shown.merged, &as_umoci());

    for seed in 0..12 {
        let mut rng = Rng::new(11_000 + seed);
        let scratch = ScratchDir::new("chain").unwrap();
        let passing = seed % 2 == 0;
        let layers: Vec<TarWriter> = (0..4)
            .map(|number| match number {
                0 if passing => base_to_pass(),
                number if passing => passing_layer(&mut rng, number),
                number => random_layer(&mut rng, number, number > 0),
            })
            .collect();
        let unpacked = umoci_unpack(&umoci, &scratch, &finished(&layers));
        let packed = chain_of(&layers);
        let shown = stack(&packed.iter().collect::<Vec<_>>(), &scratch, "stack", None);
        assert_same_trees(&unpacked, &shown.merged, &as_umoci());
    }
}

/// Everything that GNU tar reads too, written byte by byte.
fn single_archive() -> TarWriter {
    let mut tar = TarWriter::new();
    tar.pax_global(&[("comment", "as git archive writes it")]);
    tar.dir("./", 0o755);
    for (name, records) in [
        ("big-ids", &[("uid", "4294967294"), ("gid", "3000000")][..]),
        ("before-1970", &[("mtime", "-100.25")]),
        ("nanoseconds", &[("mtime", "1234567890.987654321")]),
        (
            "attributes",
            &[
                ("SCHILY.xattr.user.a", "b=c\n"),
                ("SCHILY.xattr.user.e", ""),
            ],
        ),
    ] {
        tar.pax(records);
        tar.file(name, name);
    }
    // As much as any filesystem takes that this may be extracted to.
    let longest = "x".repeat(2000);
    tar.pax(&[("SCHILY.xattr.user.long", longest.as_str())]);
    tar.file("long-attribute", "");
    tar.entry(
        &Header::new(kind::FILE, "modes").mode(0o6711).owner(1, 2),
        b"s",
    );
    tar.entry(&Header::new(kind::DIR, "sticky/").mode(0o3777), b"");
    tar.entry(&Header::new(kind::CHAR, "char").device(4000, 500_000), b"");
    tar.entry(&Header::new(kind::BLOCK, "block").device(8, 17), b"");
    tar.entry(&Header::new(kind::FIFO, "fifo"), b"");
    tar.file("n".repeat(255), "255")
        .file(b"not utf8 \xff\xfe", "n");
    tar.file("line\nbreak", "l").file("./.hidden", "h");
    tar.file(format!("{0}/{0}/{0}", "p".repeat(200)), "beyond ustar");
    tar.symlink("absolute", "/etc/passwd")
        .symlink("upwards", "../../..");
    tar.symlink("long-link", "t".repeat(4000));
    tar.file("twice", "first").file("twice", "second");
    for name in ["modes", "absolute", "char", "fifo"] {
        tar.hard_link(format!("links/{name}"), name);
    }
    // GNU tar takes the end of the last piece for that of the file, and whole blocks for pieces.
    let pieces = [(0, 512), (8192, 1024), (1 << 20, 512), (3 << 20, 0)];
    let data: Vec<u8> = (0..2048u32).map(|i| (i % 251) as u8 + 1).collect();
    tar.sparse_gnu("sparse-gnu", &pieces, 3 << 20, &data);
    tar.sparse_pax_0_0("sparse-00", &pieces, 3 << 20, &data);
    tar.sparse_pax_0_1("sparse-01", &pieces, 3 << 20, &data);
    tar.sparse_pax_1_0("sparse-10", &pieces, 3 << 20, &data);
    tar.sparse_pax_1_0(
        "sparse-9-gib",
        &[(9 << 30, 512)],
        (9 << 30) + 512,
        &[5; 512],
    );
    tar
}

#[test]
fn privileged_an_archive_is_what_gnu_tar_extracts() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("extract").unwrap();
    let bytes = single_archive().finish();
    let archive = scratch.write("archive", &bytes).unwrap();
    let dir = scratch.mkdir("dir").unwrap();
    let output = Command::new("tar")
        .args(["-xpf", &archive.display().to_string(), "-C"])
        .arg(&dir)
        .args(["--numeric-owner", "--xattrs", "--xattrs-include=*"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let file = ArchiveFile::new(&bytes);
    let packed = try_pack(&memory_store(), &options("base/a:1", file.source())).unwrap();
    let shown = stack(&[&packed], &scratch, "shown", None);
    // GNU tar gives no time to directories that no entry defines.
    let compare = Options {
        directory_times: false,
        ..Options::default().without_root()
    };
    assert_same_trees(&dir, &shown.merged, &compare);
    let data = fs_err::read(scratch.join("shown-0.data")).unwrap();
    assert_same_as_mounted(&packed.meta, &[&data], &shown.merged);
}

/// A tree changed in every way, and random ones: the stack with the difference is the new tree.
#[test]
fn privileged_a_stack_with_a_difference_is_the_new_tree() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    for seed in 0..4 {
        let scratch = ScratchDir::new("difference").unwrap();
        let (old, new) = (scratch.mkdir("old").unwrap(), scratch.mkdir("new").unwrap());
        if seed == 0 {
            let plain = NastyOptions {
                deep: false,
                huge: false,
                ..NastyOptions::default()
            };
            random(&old, &RandomOptions::new(77)).unwrap();
            nasty(&new, &plain).unwrap();
        } else {
            random(&old, &RandomOptions::new(seed)).unwrap();
            random(&new, &RandomOptions::new(seed + 500)).unwrap();
        }
        let store = memory_store();
        let base = try_pack(&store, &options("base/b:1", Source::Dir(old.clone()))).unwrap();
        let up = difference(&store, "diff/d:1", Source::Dir(new.clone()), &["base/b:1"]);
        let back = Source::Dir(old.clone());
        let back = difference(&store, "diff/d:2", back, &["base/b:1", "diff/d:1"]);
        let shown = stack(&[&base, &up], &scratch, "up", None);
        assert_same_trees(&new, &shown.merged, &Options::default());
        let shown = stack(&[&base, &up, &back], &scratch, "back", None);
        assert_same_trees(&old, &shown.merged, &Options::default());
    }
}
