//! Archives of `docker save`: a tar with `manifest.json`, configurations and layers.
//!
//! One pass finds where everything lies; layers are then read in the order of the chain, by
//! seeking in a plain archive and by reading a compressed one again up to the layer.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::spec::{Config, Platform, Saved};
use super::{Blob, Image, Place, parse_json};
use crate::error::{PackError, Result};
use crate::options::Limits;
use crate::path::components;
use crate::tar::{self, EntryKind, Reader};

/// Largest member that may be a JSON document, in bytes, and all of them together.
const MAX_DOCUMENT: u64 = 4 << 20;
const MAX_DOCUMENTS: u64 = 64 << 20;
/// Links from one member to another that are followed.
const MAX_FOLLOWED: usize = 8;

/// What the archive has under a name.
enum Member {
    /// Offset in the uncompressed archive and size, in bytes.
    File { offset: u64, size: u64 },
    /// Another member: `docker save` stores equal layers once.
    Link(Vec<u8>),
}

/// Finds the image called `name`, or the only one.
pub(super) fn open(
    path: &Path,
    name: Option<&str>,
    wanted: Option<&Platform>,
    limits: Limits,
) -> Result<Image> {
    let bad = |what: String| PackError::BadImage {
        path: path.display().to_string(),
        what,
    };
    let (members, documents) = survey(path, limits)?;
    let document =
        |name: &[u8]| find(&members, name).and_then(|(offset, _)| documents.get(&offset));
    let list = document(b"manifest.json").ok_or_else(|| {
        bad("it has no manifest.json, so it is not an archive of `docker save`".to_owned())
    })?;
    let images: Vec<Saved> = parse_json(path, list)?;
    let saved = choose(images, name).map_err(bad)?;
    let config = document(saved.config.as_bytes()).ok_or_else(|| {
        bad(format!(
            "it lacks the configuration {:?} that it names",
            saved.config
        ))
    })?;
    let config: Config = parse_json(path, config)?;
    if let Some(wanted) = wanted.filter(|wanted| !config.platform().serves(wanted)) {
        return Err(bad(format!(
            "its image is for {}, not for {}",
            config.platform().text(),
            wanted.text()
        )));
    }
    let plain = is_plain(path)?;
    let mut layers = Vec::with_capacity(saved.layers.len());
    for layer in &saved.layers {
        let (offset, size) = find(&members, layer.as_bytes())
            .ok_or_else(|| bad(format!("it lacks the layer {layer:?} that it names")))?;
        layers.push(Blob {
            name: path.join(layer),
            place: Place::Member {
                archive: path.to_owned(),
                plain,
                offset,
                size,
            },
            stored: None,
        });
    }
    Ok(Image {
        at: path.to_owned(),
        config,
        layers,
        digest: None,
    })
}

fn choose(images: Vec<Saved>, name: Option<&str>) -> Result<Saved, String> {
    let tags: Vec<String> = images
        .iter()
        .flat_map(|image| image.tags.iter().flatten().cloned())
        .collect();
    let listed = tags.join(", ");
    let count = images.len();
    let same = |rule: fn(&str) -> String| {
        let name = name.map(rule);
        images.iter().position(|image| {
            let mut tags = image.tags.iter().flatten();
            tags.any(|tag| Some(rule(tag)) == name)
        })
    };
    let found = same(str::to_owned).or_else(|| same(familiar));
    let mut images = images.into_iter();
    match name {
        Some(name) => found
            .and_then(|at| images.nth(at))
            .ok_or_else(|| format!("it has no image {name:?}; it has: {listed}")),
        None if count > 1 => Err(format!(
            "it has several images; name one as docker-archive:FILE:NAME: {listed}"
        )),
        None => images.next().ok_or_else(|| "it has no image".to_owned()),
    }
}

/// A name as docker shows it: without its own registry, and with the tag that it takes by default.
fn familiar(name: &str) -> String {
    let short = name.strip_prefix("docker.io/").unwrap_or(name);
    let short = short.strip_prefix("library/").unwrap_or(short);
    let last = short.rsplit('/').next().unwrap_or(short);
    match last.contains(':') {
        true => short.to_owned(),
        false => format!("{short}:latest"),
    }
}

type Documents = BTreeMap<u64, Vec<u8>>;
type Members = BTreeMap<Vec<u8>, Member>;

/// Where everything lies, and the small members that may be documents, by their offsets.
fn survey(path: &Path, limits: Limits) -> Result<(Members, Documents)> {
    let (counted, position) = Counted::new(tar::open(path, limits.max_ratio)?.reader);
    let mut reader = Reader::new(counted, path.display().to_string(), limits);
    let (mut members, mut documents) = (Members::new(), Documents::new());
    let mut kept = 0;
    let mut entries = 0;
    while let Some(entry) = reader.next_entry()? {
        entries += 1;
        if entries > limits.max_entries {
            return Err(PackError::Limit {
                object: path.display().to_string(),
                name: "max_entries",
                limit: limits.max_entries,
                unit: "members",
            });
        }
        limits.check_path(&entry.path)?;
        let name = components(&entry.path).join(&b'/');
        match entry.kind {
            EntryKind::File(None) => {
                let offset = position.load(Ordering::Relaxed);
                if entry.size <= MAX_DOCUMENT && kept + entry.size <= MAX_DOCUMENTS {
                    let mut bytes = Vec::new();
                    reader
                        .read_to_end(&mut bytes)
                        .map_err(|error| reader.error(error))?;
                    // Small layers are no documents; they are read like others.
                    if bytes
                        .first()
                        .is_some_and(|first| matches!(first, b'{' | b'['))
                    {
                        kept += entry.size;
                        documents.insert(offset, bytes);
                    }
                }
                members.insert(
                    name,
                    Member::File {
                        offset,
                        size: entry.size,
                    },
                );
            }
            EntryKind::Symlink => {
                let mut target = name.clone();
                target.extend_from_slice(b"/../");
                target.extend_from_slice(&entry.link);
                members.insert(name, Member::Link(components(&target).join(&b'/')));
            }
            EntryKind::HardLink => {
                members.insert(name, Member::Link(components(&entry.link).join(&b'/')));
            }
            _ => {}
        }
    }
    Ok((members, documents))
}

/// Offset and size of a member.
fn find(members: &Members, name: &[u8]) -> Option<(u64, u64)> {
    let mut name = components(name).join(&b'/');
    for _ in 0..MAX_FOLLOWED {
        match members.get(&name)? {
            Member::File { offset, size } => return Some((*offset, *size)),
            Member::Link(target) => name.clone_from(target),
        }
    }
    None
}

/// The bytes of a member.
pub(super) fn member(
    archive: &Path,
    plain: bool,
    offset: u64,
    size: u64,
) -> Result<Box<dyn Read + Send>> {
    let io = |source| PackError::io("read", archive.display().to_string(), source);
    if plain {
        let mut file = super::open_regular(archive)?;
        file.seek(SeekFrom::Start(offset)).map_err(io)?;
        return Ok(Box::new(file.take(size)));
    }
    // All of it was read once, within the limits.
    let mut input = tar::open(archive, u64::MAX)?.reader;
    io::copy(&mut (&mut input).take(offset), &mut io::sink()).map_err(io)?;
    Ok(Box::new(input.take(size)))
}

/// Whether the archive is not compressed, so that offsets are those of the file.
fn is_plain(path: &Path) -> Result<bool> {
    let io = |source| PackError::io("read", path.display().to_string(), source);
    let mut start = Vec::new();
    let file = super::open_regular(path)?;
    file.take(512).read_to_end(&mut start).map_err(io)?;
    Ok(start.get(257..262) == Some(b"ustar"))
}

/// Counts what is read.
struct Counted<R> {
    inner: R,
    position: Arc<AtomicU64>,
}

impl<R> Counted<R> {
    fn new(inner: R) -> (Self, Arc<AtomicU64>) {
        let position = Arc::new(AtomicU64::new(0));
        let shared = Arc::clone(&position);
        (Self { inner, position }, shared)
    }
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.position.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_as_docker_writes_them() {
        let images = || {
            [
                &["docker.io/library/deb:12"][..],
                &["docker.io/team/x:latest", "reg.example:5000/y:1"],
            ]
            .map(|tags| Saved {
                tags: Some(tags.iter().map(|tag| (*tag).to_owned()).collect()),
                ..serde_json::from_str(r#"{"Config":"c","Layers":[]}"#).unwrap()
            })
            .into()
        };
        for (name, first) in [
            ("deb:12", true),
            ("library/deb:12", true),
            ("docker.io/deb:12", true),
            ("team/x", false),
            ("team/x:latest", false),
            ("reg.example:5000/y:1", false),
        ] {
            let found = choose(images(), Some(name)).unwrap();
            assert_eq!(found.tags.unwrap().len() == 1, first, "{name}");
        }
        for name in ["deb", "deb:13", "x", "y:1", "reg.example:5000/y"] {
            assert!(choose(images(), Some(name)).is_err(), "{name}");
        }
    }
}
