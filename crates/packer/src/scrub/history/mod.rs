//! Git references and reflogs that are newer than a commit.
//!
//! Old are that commit and those that it is made on, at any distance; everything else is newer. The
//! commits are read where git has them, loose or packed, in the upper and in the layers below. A
//! reference whose commit cannot be read counts as newer.

mod ancestry;
mod below;
pub(crate) mod objects;

use std::path::Path;

use rustix::fs::{Mode, OFlags};

use ancestry::{Age, Ancestry};
pub(super) use below::{find, names_newer};
use objects::{Files, Id, Mounted, Objects};

/// Largest file of git that is read, in bytes. A larger one is left out where its repository has the
/// commit of a rule.
pub(super) const MOST_READ: u64 = 64 << 20;

/// What becomes of a file of git.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays as it is.
    Stays,
    /// It is left out.
    Goes(Why),
    /// It stays without some of its lines.
    Shorter(Vec<u8>, Why),
}

/// Why something of a file of git goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// A commit is not the named one, and the named one is not made on it.
    Newer,
    /// There are more commits behind the named one than are looked at.
    Unknown,
}

impl Why {
    /// The word for it in reports.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Newer => "newer-commit",
            Self::Unknown => "history-too-long",
        }
    }
}

/// A file of git that can name commits.
pub(super) struct Named<'a> {
    /// The repository's directory.
    pub directory: &'a [u8],
    /// The file's path in it.
    file: &'a [u8],
}

/// Whether a path is one of a file that can name commits.
pub(super) fn named(path: &[u8]) -> Option<Named<'_>> {
    let mut end = 0;
    for part in path.split(|byte| *byte == b'/') {
        end += part.len();
        if part == b".git" {
            let file = path.get(end + 1..)?;
            return names_commits(file).then_some(Named {
                directory: path.get(..end)?,
                file,
            });
        }
        end += 1;
    }
    None
}

fn names_commits(file: &[u8]) -> bool {
    let mut parts = file.rsplit(|byte| *byte == b'/');
    let name = parts.next().unwrap_or_default();
    let parent = parts.next().unwrap_or_default();
    // What an interrupted command notes down.
    let pending = matches!(parent, b"rebase-merge" | b"rebase-apply" | b"sequencer");
    let names = file.starts_with(b"refs/")
        || file.starts_with(b"logs/")
        || file.windows(6).any(|w| w == b"/logs/" || w == b"/refs/")
        || name == b"packed-refs"
        || file == b"info/refs"
        || name.ends_with(b"HEAD")
        || name.starts_with(b"BISECT_")
        || pending && is_note(name)
        || is_table(file);
    names && !file.starts_with(b"objects/")
}

/// Files of an interrupted command that hold one id.
fn is_note(name: &[u8]) -> bool {
    matches!(
        name,
        b"orig-head" | b"onto" | b"head" | b"stopped-sha" | b"abort-safety" | b"original-commit"
    )
}

/// Whether a file holds references in git's binary form, which is not read here.
fn is_table(file: &[u8]) -> bool {
    file.starts_with(b"reftable/") || file.windows(10).any(|w| w == b"/reftable/")
}

/// The history of repositories, as the upper and the layers below have it.
pub(super) struct History {
    ancestry: Ancestry,
}

impl History {
    /// That of the layers given, topmost first.
    pub(super) fn new(roots: Vec<Box<dyn Files>>) -> Self {
        Self {
            ancestry: Ancestry::new(Objects::new(roots)),
        }
    }

    /// The commit that a rule names, where the repository has it.
    pub(super) fn commit(&mut self, repository: &[u8], hex: &str) -> Option<Limit> {
        self.ancestry.named(repository, hex).map(Limit)
    }

    fn age(&mut self, repository: &[u8], id: &[u8], limit: &Limit) -> Age {
        match Id::parse(id) {
            None => Age::Newer,
            Some(id) if id.is_zero() => Age::Old, // no commit
            Some(id) => self.ancestry.age(repository, &id, &limit.0),
        }
    }

    /// What becomes of a file, where commits newer than `limit` are not to be named.
    pub(super) fn fate(&mut self, named: &Named<'_>, bytes: &[u8], limit: &Limit) -> Fate {
        let repository = named.directory;
        if is_table(named.file) {
            return Fate::Stays; // see `is_unread`
        }
        let mut why = None;
        let mut is_newer = |id: &[u8]| {
            let found = match self.age(repository, id, limit) {
                Age::Old => return false,
                Age::Newer => Why::Newer,
                Age::Unknown => Why::Unknown,
            };
            if why != Some(Why::Unknown) {
                why = Some(found);
            }
            true
        };
        let name = named.file.rsplit(|byte| *byte == b'/').next();
        let in_logs = named.file.starts_with(b"logs/")
            || named.file.windows(6).any(|window| window == b"/logs/");
        let lists = name == Some(b"packed-refs")
            || name == Some(b"FETCH_HEAD")
            || named.file == b"info/refs";
        if !in_logs && !lists {
            let words = bytes.split(|byte| byte.is_ascii_whitespace());
            let newer = words.filter(|word| is_id(word)).any(&mut is_newer);
            return match newer {
                true => Fate::Goes(why.unwrap_or(Why::Newer)),
                false => Fate::Stays,
            };
        }
        let mut left = Vec::with_capacity(bytes.len());
        let mut peeled_too = false;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let mut words = line.split(|byte| byte.is_ascii_whitespace());
            let first = words.next().unwrap_or_default();
            // A line of a reflog says what was and what is.
            let then = match in_logs {
                true => words.next().unwrap_or_default(),
                false => first,
            };
            let peeled = first.starts_with(b"^");
            let goes = match peeled {
                true => peeled_too,
                false => [first, then].iter().any(|id| is_id(id) && is_newer(id)),
            };
            if !peeled {
                peeled_too = goes;
            }
            if !goes {
                left.extend_from_slice(line);
            }
        }
        let why = why.unwrap_or(Why::Newer);
        match left.len() == bytes.len() {
            true => Fate::Stays,
            false if left.is_empty() => Fate::Goes(why),
            false => Fate::Shorter(left, why),
        }
    }
}

/// Whether a file names commits in a form that is not read here.
pub(super) fn is_unread(named: &Named<'_>) -> bool {
    is_table(named.file)
}

/// The commit that others are not to be newer than, in one repository.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit(Id);

/// The directories that can be opened as layers.
pub(super) fn mounted<'a>(roots: impl Iterator<Item = &'a Path>) -> Vec<Box<dyn Files>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = roots.filter_map(|root| rustix::fs::open(root, flags, Mode::empty()).ok());
    opened
        .map(|fd| Box::new(Mounted(fd)) as Box<dyn Files>)
        .collect()
}

fn is_id(text: &[u8]) -> bool {
    matches!(text.len(), 40 | 64) && text.iter().all(u8::is_ascii_hexdigit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_name_commits() {
        let of = |path: &str| {
            named(path.as_bytes()).map(|n| String::from_utf8_lossy(n.directory).into_owned())
        };
        for path in [
            "a/.git/refs/heads/x",
            "a/.git/logs/HEAD",
            "a/.git/packed-refs",
            "a/.git/ORIG_HEAD",
            "a/.git/info/refs",
            "a/.git/worktrees/w/HEAD",
            "a/.git/worktrees/w/logs/HEAD",
            "a/.git/rebase-merge/orig-head",
            "a/.git/worktrees/w/rebase-apply/onto",
            "a/.git/BISECT_START",
            "a/.git/reftable/0x1-0x2.ref",
        ] {
            assert_eq!(of(path).as_deref(), Some("a/.git"), "{path}");
        }
        for path in [
            "a/.git/config",
            "a/.git/objects/x/HEAD",
            "a/git/refs/x",
            ".git",
            "a/.git/onto",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }
}
