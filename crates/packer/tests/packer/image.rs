//! Container images: what their layers mean together, and what is refused.

use std::path::Path;

use layerpack_erofs::FileType;
use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::{ImageSource, ImportOptions, ImportReport, PackError, Silent, import};
use layerpack_store::LayerStore;
use sha2::{Digest as _, Sha256};

use crate::support::{Packed, chain, memory_store};

pub fn sha(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An OCI layout under construction.
pub struct Layout<'a> {
    dir: &'a Path,
    manifests: Vec<String>,
}

impl<'a> Layout<'a> {
    pub fn new(dir: &'a Path) -> Self {
        fs_err::create_dir_all(dir.join("blobs/sha256")).unwrap();
        fs_err::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self {
            dir,
            manifests: Vec::new(),
        }
    }

    pub fn blob(&self, bytes: &[u8]) -> String {
        let digest = sha(bytes);
        let name = digest.strip_prefix("sha256:").unwrap();
        fs_err::write(self.dir.join("blobs/sha256").join(name), bytes).unwrap();
        digest
    }

    /// Adds an image of uncompressed tars, stored as gzip.
    pub fn image(&mut self, tag: &str, arch: &str, layers: &[Vec<u8>]) -> &mut Self {
        let ids: Vec<String> = layers
            .iter()
            .map(|raw| format!("\"{}\"", sha(raw)))
            .collect();
        let config = format!(
            r#"{{"architecture":"{arch}","os":"linux","config":{{"Env":["A=b"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            ids.join(",")
        );
        let descriptors: Vec<String> = layers
            .iter()
            .map(|raw| {
                let stored = gzip(raw);
                format!(
                    r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"{}","size":{}}}"#,
                    self.blob(&stored),
                    stored.len()
                )
            })
            .collect();
        let manifest = format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{}","size":{}}},"layers":[{}]}}"#,
            self.blob(config.as_bytes()),
            config.len(),
            descriptors.join(",")
        );
        self.manifests.push(format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{}","size":{},"platform":{{"os":"linux","architecture":"{arch}"}},"annotations":{{"org.opencontainers.image.ref.name":"{tag}"}}}}"#,
            self.blob(manifest.as_bytes()),
            manifest.len()
        ));
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
            self.manifests.join(",")
        );
        fs_err::write(self.dir.join("index.json"), index).unwrap();
        self
    }
}

pub fn options(scratch: &ScratchDir, tag: &str) -> ImportOptions {
    let source: ImageSource = format!("oci:{}{tag}", scratch.path().display())
        .parse()
        .unwrap();
    ImportOptions::new("base/i:1".parse().unwrap(), source)
}

fn try_image(layers: Vec<TarWriter>) -> Result<Packed, PackError> {
    let scratch = ScratchDir::new("image").unwrap();
    let layers: Vec<Vec<u8>> = layers.into_iter().map(TarWriter::finish).collect();
    Layout::new(scratch.path()).image("t", "amd64", &layers);
    let store = memory_store();
    let ImportReport { mut layers, .. } = import(&store, &options(&scratch, ""), &Silent)?;
    let report = layers.pop().unwrap();
    Ok(Packed::load(
        &store,
        report.published.digest,
        report.warnings,
    ))
}

#[track_caller]
fn image(layers: Vec<TarWriter>) -> Packed {
    try_image(layers).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

pub fn layer(fill: impl FnOnce(&mut TarWriter)) -> TarWriter {
    let mut tar = TarWriter::new();
    fill(&mut tar);
    tar
}

#[test]
fn a_directory_that_an_upper_layer_passes_through_keeps_what_it_is() {
    let packed = image(vec![
        layer(|tar| {
            tar.dir("./", 0o711);
            tar.pax(&[("SCHILY.xattr.user.x", "kept")]);
            tar.entry(
                &Header::new(kind::DIR, "tmp")
                    .mode(0o1777)
                    .owner(7, 8)
                    .mtime(9),
                b"",
            );
        }),
        layer(|tar| {
            tar.file("tmp/a", "1").file("new/b", "2");
        }),
    ]);
    let tree = packed.tree();
    let tmp = tree.get("tmp");
    assert_eq!(
        (tmp.mode, tmp.uid, tmp.gid, tmp.mtime),
        (0o1777, 7, 8, (9, 0))
    );
    assert_eq!(tmp.xattrs.get(&b"user.x"[..]).unwrap(), b"kept");
    assert_eq!((tree.get("").mode, tree.get("new").mode), (0o711, 0o755));
    assert_eq!(packed.manifest.platform, "linux/amd64");
    assert_eq!(
        packed.manifest.annotations["oci.config"],
        r#"{"Env":["A=b"]}"#
    );
}

#[test]
fn whiteouts_hide_lower_layers_only_wherever_they_stand() {
    let lower = || {
        layer(|tar| {
            tar.dir("d", 0o755)
                .file("d/old", "1")
                .file("d/keep", "1")
                .file("gone", "1");
            tar.file("again", "old")
                .dir("op", 0o755)
                .file("op/old", "1");
        })
    };
    for flip in [false, true] {
        let upper = layer(|tar| {
            let marks = |tar: &mut TarWriter| {
                tar.whiteout("", "d")
                    .whiteout("", "gone")
                    .whiteout("", "again");
                tar.whiteout("", "never")
                    .whiteout("no/such", "place")
                    .opaque("op");
            };
            let files = |tar: &mut TarWriter| {
                tar.dir("d", 0o700).file("d/new", "2").file("again", "new");
                tar.file("op/new", "2");
            };
            if flip {
                files(tar);
                marks(tar);
            } else {
                marks(tar);
                files(tar);
            }
        });
        let tree = image(vec![lower(), upper]).tree();
        assert!(!tree.has("d/old") && !tree.has("d/keep") && tree.has("d/new"));
        assert!(!tree.has("gone") && !tree.has("never") && !tree.has("op/old"));
        assert!(tree.has("op/new"));
        assert_eq!(tree.get("again").content(), b"new");
        assert_eq!((tree.get("d").mode, tree.get("op").mode), (0o700, 0o755));
        for node in tree.nodes.values() {
            assert!(node.xattrs.is_empty() && node.kind != FileType::CharDevice);
        }
    }
}

#[test]
fn an_opaque_root_hides_everything() {
    let tree = image(vec![
        layer(|tar| {
            tar.dir("a", 0o755).file("a/b", "1");
        }),
        layer(|tar| {
            tar.opaque("").file("c", "1");
        }),
    ])
    .tree();
    assert_eq!(tree.paths(), ["", "c"]);
}

#[test]
fn types_change_both_ways() {
    let tree = image(vec![
        layer(|tar| {
            tar.dir("d", 0o755)
                .file("d/x", "1")
                .file("f", "1")
                .symlink("l", "d");
        }),
        layer(|tar| {
            tar.file("d", "now a file").dir("f", 0o711).file("f/y", "1");
            tar.dir("l", 0o700).file("l/z", "1");
        }),
    ])
    .tree();
    assert_eq!(tree.get("d").content(), b"now a file");
    assert_eq!(tree.paths(), ["", "d", "f", "f/y", "l", "l/z"]);
}

#[test]
fn paths_lead_through_links_of_lower_layers_unless_they_were_removed() {
    let lower = || {
        layer(|tar| {
            tar.dir("usr/", 0o755)
                .dir("usr/lib", 0o751)
                .symlink("lib", "usr/lib");
            tar.symlink("abs", "/usr/lib").symlink("out", "../../usr");
        })
    };
    let tree = image(vec![
        lower(),
        layer(|tar| {
            tar.file("lib/a", "1")
                .file("abs/b", "1")
                .file("out/c", "1")
                .dir("lib/d", 0o700);
        }),
    ])
    .tree();
    for path in ["usr/lib/a", "usr/lib/b", "usr/c", "usr/lib/d"] {
        assert!(tree.has(path), "{path}");
    }
    assert_eq!(tree.get("lib").kind, FileType::Symlink);
    assert_eq!(tree.get("usr/lib").mode, 0o751);
    let tree = image(vec![
        lower(),
        layer(|tar| {
            tar.whiteout("", "lib").file("lib/a", "1");
        }),
    ])
    .tree();
    assert_eq!(tree.get("lib").kind, FileType::Directory);
    assert!(tree.has("lib/a") && !tree.has("usr/lib/a"));
}

#[test]
fn hard_links_to_files_of_lower_layers_are_one_file_with_them() {
    let scratch = ScratchDir::new("image").unwrap();
    let layers = vec![
        layer(|tar| {
            tar.dir("d", 0o755)
                .file("d/a", "content")
                .hard_link("d/b", "d/a")
                .file("x", "1");
            tar.symlink("s", "d/a");
        })
        .finish(),
        layer(|tar| {
            tar.hard_link("c", "d/a").hard_link("t", "s");
        })
        .finish(),
        layer(|tar| {
            tar.whiteout("d", "b").hard_link("e", "x");
        })
        .finish(),
    ];
    Layout::new(scratch.path()).image("t", "amd64", &layers);
    let store = memory_store();
    let mut options = options(&scratch, "");
    let flat = import(&store, &options, &Silent).unwrap().layers;
    let flat = Packed::load(&store, flat[0].published.digest, Vec::new());
    let tree = flat.tree();
    assert_eq!(tree.links("c"), ["c", "d/a"]);
    assert_eq!(tree.links("e"), ["e", "x"]);
    assert_eq!(tree.links("t"), ["s", "t"]);
    assert_eq!(tree.get("c").content(), b"content");

    // Layer by layer, the file is copied up with all its names.
    options.reference = "base/per:1".parse().unwrap();
    options.per_layer = true;
    let report = import(&store, &options, &Silent).unwrap();
    let packed: Vec<Packed> = report
        .layers
        .iter()
        .map(|layer| Packed::load(&store, layer.published.digest, Vec::new()))
        .collect();
    let names: Vec<String> = report
        .layers
        .iter()
        .map(|layer| layer.published.reference.to_string())
        .collect();
    assert_eq!(names, ["base/per:1", "diff/per:1-layer-2", "diff/per:1"]);
    assert_eq!(packed[1].tree().links("c"), ["c", "d/a", "d/b"]);
    assert!(packed[1].tree().is_implicit("d"));
    assert_eq!(packed[2].manifest.parents.len(), 2);
    let merged = crate::merge::try_merge(
        &store,
        "base/merged:1",
        &["base/per:1", "diff/per:1-layer-2", "diff/per:1"],
    )
    .unwrap();
    assert_eq!(merged.manifest.layer_id(), flat.manifest.layer_id());
}

/// What a rename is written as: a link to the file of a lower layer, then a mark that takes the old
/// name away.
#[test]
fn a_lower_file_that_is_linked_to_loses_its_name_to_a_later_mark() {
    type Mark = fn(&mut TarWriter);
    let marks: [Mark; 4] = [
        |tar| {
            tar.whiteout("c/a", "c");
        },
        |tar| {
            tar.whiteout("c", "a");
        },
        |tar| {
            tar.opaque("c");
        },
        |tar| {
            tar.opaque("");
        },
    ];
    for (number, mark) in marks.into_iter().enumerate() {
        let tree = image(vec![
            layer(|tar| {
                tar.dir("c", 0o755).dir("c/a", 0o755).file("c/a/c", "1");
            }),
            layer(|tar| {
                tar.hard_link("n", "c/a/c");
                mark(tar);
            }),
        ])
        .tree();
        assert_eq!(tree.links("n"), ["n"], "{number}");
        assert_eq!(tree.get("n").content(), b"1");
        let paths = tree.paths();
        assert!(!paths.iter().any(|path| path == "c/a/c"), "{paths:?}");
        assert_eq!(
            paths.iter().any(|path| path == "c/a"),
            number == 0,
            "{paths:?}"
        );
    }
    // In its place something else may come.
    let tree = image(vec![
        layer(|tar| {
            tar.dir("a", 0o755).file("a/f", "1");
        }),
        layer(|tar| {
            tar.hard_link("n", "a/f")
                .whiteout("", "a")
                .file("a/b/f", "2");
        }),
    ])
    .tree();
    assert_eq!(tree.get("a/b/f").content(), b"2");
    assert_eq!(tree.links("n"), ["n"]);
}

/// A directory that nothing but a mark's path names does not outlive a mark of itself.
#[test]
fn directories_of_marks_alone_go_with_what_they_are_marked_in() {
    type Marks = fn(&mut TarWriter);
    let marks: [Marks; 3] = [
        |tar| {
            tar.whiteout("c/a", "b").whiteout("c", "a");
        },
        |tar| {
            tar.whiteout("c/a", "c").opaque("c");
        },
        |tar| {
            tar.opaque("c/a").whiteout("c", "a");
        },
    ];
    for marks in marks {
        let layers = |filled: bool| {
            vec![
                layer(|tar| {
                    tar.dir("c", 0o755).dir("c/a", 0o755).file("c/a/c", "1");
                }),
                layer(|tar| {
                    marks(tar);
                    if filled {
                        tar.file("c/a/new", "2");
                    }
                }),
            ]
        };
        let paths = image(layers(false)).tree().paths();
        assert!(
            !paths.iter().any(|path| path.starts_with("c/a")),
            "{paths:?}"
        );
        let paths = image(layers(true)).tree().paths();
        assert!(paths.iter().any(|path| path == "c/a/new"), "{paths:?}");
        assert!(!paths.iter().any(|path| path == "c/a/c"), "{paths:?}");
    }
}

#[test]
fn foreign_overlay_marks_of_an_image_mean_nothing() {
    let packed = image(vec![
        layer(|tar| {
            tar.dir("d", 0o755).file("d/a", "1");
        }),
        layer(|tar| {
            tar.pax(&[
                ("SCHILY.xattr.trusted.overlay.opaque", "y"),
                ("SCHILY.xattr.trusted.overlay.redirect", "/etc"),
                ("SCHILY.xattr.user.overlay.opaque", "y"),
            ]);
            tar.entry(&Header::new(kind::DIR, "d").mode(0o755), b"");
            tar.entry(&Header::new(kind::CHAR, "d/a").device(0, 0), b"");
        }),
    ]);
    assert!(packed.tree().get("d").xattrs.is_empty());
    assert!(!packed.warnings.is_empty());
}

#[test]
fn tags_and_platforms() {
    let scratch = ScratchDir::new("image").unwrap();
    let file = |name: &str| {
        vec![
            layer(|tar| {
                tar.file(name, "1");
            })
            .finish(),
        ]
    };
    Layout::new(scratch.path())
        .image("a", "amd64", &file("a-amd64"))
        .image("a", "arm64", &file("a-arm64"))
        .image("b", "amd64", &file("b"));
    let store = memory_store();
    let take = |tag: &str, platform: Option<&str>, host: &str, version: &str| {
        let mut options = options(&scratch, tag);
        options.reference = format!("base/i:{version}").parse().unwrap();
        options.platform = platform.map(str::to_owned);
        options.host = host.to_owned();
        match import(&store, &options, &Silent) {
            Ok(report) => {
                let digest = report.layers[0].published.digest;
                Ok(Packed::load(&store, digest, Vec::new()).tree().paths()[1].clone())
            }
            Err(error) => Err(chain(&error)),
        }
    };
    assert_eq!(take(":a", None, "linux/amd64", "1").unwrap(), "a-amd64");
    assert_eq!(take(":a", None, "linux/arm64", "2").unwrap(), "a-arm64");
    assert_eq!(
        take(":a", Some("linux/arm64"), "linux/amd64", "3").unwrap(),
        "a-arm64"
    );
    assert_eq!(take(":b", None, "linux/riscv64", "4").unwrap(), "b");
    assert!(
        take(":b", Some("linux/arm64"), "linux/arm64", "5")
            .unwrap_err()
            .contains("linux/amd64")
    );
    assert!(
        take(":c", None, "linux/amd64", "5")
            .unwrap_err()
            .contains("it has: a, b")
    );
    assert!(
        take("", None, "linux/amd64", "5")
            .unwrap_err()
            .contains("several images")
    );
    assert!(
        take(":a", Some("amd64"), "linux/amd64", "5")
            .unwrap_err()
            .contains("os/architecture")
    );
}

#[test]
fn whatever_does_not_fit_its_digest_is_refused_and_nothing_is_published() {
    let build = || {
        let scratch = ScratchDir::new("image").unwrap();
        let raw = layer(|tar| {
            tar.file("a", "1");
        })
        .finish();
        Layout::new(scratch.path()).image("t", "amd64", &[raw]);
        scratch
    };
    let blobs = |scratch: &ScratchDir| {
        let mut blobs: Vec<_> = fs_err::read_dir(scratch.join("blobs/sha256"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        blobs.sort();
        blobs
    };
    let count = blobs(&build()).len();
    assert_eq!(count, 3);
    for index in 0..count {
        for change in 0..4 {
            let scratch = build();
            let path = &blobs(&scratch)[index];
            let mut bytes = fs_err::read(path).unwrap();
            match change {
                // A pipe, for which nobody would ever wait.
                3 => {
                    fs_err::remove_file(path).unwrap();
                    let made = std::process::Command::new("mkfifo").arg(path).status();
                    assert!(made.unwrap().success());
                }
                0 => bytes.push(b' '),
                1 => drop(bytes.pop()),
                2 => bytes[12] ^= 1,
                _ => unreachable!(),
            }
            if change != 3 {
                fs_err::write(path, bytes).unwrap();
            }
            let store = memory_store();
            let error = import(&store, &options(&scratch, ""), &Silent).unwrap_err();
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(chain(&error).contains(name), "{}", chain(&error));
            assert!(store.list().unwrap().is_empty());
        }
    }
    // A layer that fits its own digest and not the configuration.
    let scratch = ScratchDir::new("image").unwrap();
    let raw = layer(|tar| {
        tar.file("a", "1");
    })
    .finish();
    Layout::new(scratch.path()).image("t", "amd64", &[raw]);
    let other = gzip(
        &layer(|tar| {
            tar.file("b", "1");
        })
        .finish(),
    );
    let layout = Layout {
        dir: scratch.path(),
        manifests: Vec::new(),
    };
    let digest = layout.blob(&other);
    let index = fs_err::read_to_string(scratch.join("index.json")).unwrap();
    let old = index.split("sha256:").nth(1).unwrap()[..64].to_owned();
    let manifest = fs_err::read_to_string(scratch.join("blobs/sha256").join(&old)).unwrap();
    let at = manifest.rfind("sha256:").unwrap();
    let size = other.len();
    let manifest = format!("{}{digest}\",\"size\":{size}}}]}}", &manifest[..at]);
    let new = layout.blob(manifest.as_bytes());
    let old_size = index
        .split("\"size\":")
        .nth(1)
        .unwrap()
        .split(',')
        .next()
        .unwrap()
        .to_owned();
    let index = index.replace(&format!("sha256:{old}"), &new).replace(
        &format!("\"size\":{old_size}"),
        &format!("\"size\":{}", manifest.len()),
    );
    fs_err::write(scratch.join("index.json"), index).unwrap();
    let error = import(&memory_store(), &options(&scratch, ""), &Silent).unwrap_err();
    assert!(
        chain(&error).contains("configuration says"),
        "{}",
        chain(&error)
    );
}

#[test]
fn sources_are_told_apart_from_names() {
    let scratch = ScratchDir::new("image").unwrap();
    scratch.mkdir("a:b").unwrap();
    scratch.mkdir("c").unwrap();
    let parse = |text: &str| {
        format!("oci:{}/{text}", scratch.path().display())
            .parse::<ImageSource>()
            .unwrap()
    };
    let oci = |dir: &str, tag: Option<&str>| ImageSource::Oci {
        dir: scratch.join(dir),
        tag: tag.map(str::to_owned),
    };
    assert_eq!(parse("a:b"), oci("a:b", None));
    assert_eq!(parse("a:b:t"), oci("a:b", Some("t")));
    assert_eq!(parse("c:x:y"), oci("c", Some("x:y")));
    assert_eq!(parse("missing"), oci("missing", None));
    for bad in ["oci", "oci:", "what:x"] {
        assert!(bad.parse::<ImageSource>().is_err(), "{bad}");
    }
    assert!(ImageSource::is_image("docker-archive:x") && !ImageSource::is_image("tar:x"));
}

/// The archive of `docker save`, in its older form: directories of layers, links for repeats.
fn saved(layers: &[Vec<u8>], link_last: bool) -> Vec<u8> {
    let ids: Vec<String> = layers
        .iter()
        .map(|raw| format!("\"{}\"", sha(raw)))
        .collect();
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        ids.join(",")
    );
    let names: Vec<String> = (0..layers.len())
        .map(|i| format!("\"l{i}/layer.tar\""))
        .collect();
    let mut tar = TarWriter::new();
    // Not in the order of the chain.
    for (index, raw) in layers.iter().enumerate().rev() {
        tar.dir(format!("l{index}/"), 0o755);
        if link_last && index + 1 == layers.len() {
            tar.symlink(format!("l{index}/layer.tar"), "../l0/layer.tar");
        } else {
            tar.file(format!("l{index}/layer.tar"), raw);
        }
    }
    tar.file("abc.json", &config);
    tar.file(
        "manifest.json",
        format!(
            r#"[{{"Config":"abc.json","RepoTags":["x:1"],"Layers":[{}]}}]"#,
            names.join(",")
        ),
    );
    tar.finish()
}

fn import_archive(store: &LayerStore, bytes: &[u8], name: &str) -> Result<Packed, PackError> {
    let scratch = ScratchDir::new("saved").unwrap();
    let path = scratch.write("saved.tar", bytes).unwrap();
    let source = format!("docker-archive:{}{name}", path.display())
        .parse()
        .unwrap();
    let options = ImportOptions::new("base/i:1".parse().unwrap(), source);
    let report = import(store, &options, &Silent)?;
    Ok(Packed::load(
        store,
        report.layers[0].published.digest,
        Vec::new(),
    ))
}

#[test]
fn docker_archives_plain_and_compressed() {
    let first = layer(|tar| {
        tar.file("a", "1").file("b", "1");
    })
    .finish();
    let second = layer(|tar| {
        tar.whiteout("", "a").file("c", "1");
    })
    .finish();
    let mut ids = Vec::new();
    for bytes in [
        saved(&[first.clone(), second.clone()], false),
        gzip(&saved(&[first.clone(), second.clone()], false)),
    ] {
        let packed = import_archive(&memory_store(), &bytes, "").unwrap();
        assert_eq!(packed.tree().paths(), ["", "b", "c"]);
        ids.push(packed.manifest.layer_id());
    }
    assert_eq!(ids[0], ids[1]);
    // A repeated layer, as a link.
    let bytes = saved(&[first.clone(), second, first], true);
    let packed = import_archive(&memory_store(), &bytes, ":x:1").unwrap();
    assert_eq!(packed.tree().paths(), ["", "a", "b", "c"]);
    let error = import_archive(&memory_store(), &bytes, ":y").err().unwrap();
    assert!(chain(&error).contains("it has: x:1"), "{}", chain(&error));
    let error = import_archive(&memory_store(), &TarWriter::new().finish(), "")
        .err()
        .unwrap();
    assert!(chain(&error).contains("manifest.json"));
}

#[test]
fn bombs_are_bounded_over_all_layers() {
    let scratch = ScratchDir::new("image").unwrap();
    let big = || {
        layer(|tar| {
            tar.file("zeros", vec![0; 6 << 20]);
        })
        .finish()
    };
    Layout::new(scratch.path()).image("t", "amd64", &[big(), big()]);
    let mut options = options(&scratch, "");
    options.limits.max_bytes = 10 << 20;
    let error = import(&memory_store(), &options, &Silent).unwrap_err();
    assert!(chain(&error).contains("--max-bytes"), "{}", chain(&error));
    options.limits.max_bytes = 14 << 20;
    import(&memory_store(), &options, &Silent).unwrap();
}

#[test]
fn a_layer_that_cannot_be_packed_keeps_those_below_back() {
    let scratch = ScratchDir::new("image-per-layer-fails").unwrap();
    let good = layer(|tar| {
        tar.dir("d", 0o755).file("d/f", "1");
    })
    .finish();
    let bad = layer(|tar| {
        tar.hard_link("x", "not/there");
    })
    .finish();
    let store = memory_store();
    let mut options = options(&scratch, "");
    options.reference = "base/per:1".parse().unwrap();
    options.per_layer = true;
    Layout::new(scratch.path()).image("t", "amd64", &[good.clone(), good.clone(), bad]);
    let error = import(&store, &options, &Silent).unwrap_err();
    assert!(error.to_string().contains("not/there"), "{error}");
    assert!(store.list().unwrap().is_empty());
    // And a version that is taken.
    fs_err::remove_dir_all(scratch.path()).unwrap();
    fs_err::create_dir_all(scratch.path()).unwrap();
    Layout::new(scratch.path()).image("t", "amd64", &[good.clone(), good]);
    let other = scratch.mkdir("other").unwrap();
    let taken = crate::support::options("workspace/x:1", layerpack_packer::Source::Dir(other));
    let mut taken = taken;
    taken.reference = "diff/per:1".parse().unwrap();
    layerpack_packer::build(&store, &taken, &Silent).unwrap();
    let error = import(&store, &options, &Silent).unwrap_err();
    assert!(error.to_string().contains("diff/per:1"), "{error}");
    let names: Vec<String> = (store.list().unwrap().iter())
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, ["diff/per:1"]);
}
