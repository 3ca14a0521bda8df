//! Whether a commit is one that another is made on.
//!
//! That is told by what commits name as their parents, never by their times, which anybody can set:
//! times only decide which commit is looked at next. It is looked for from both ends, so that the usual
//! case, new commits on top of a long history, ends after a few steps.

use std::collections::{BinaryHeap, HashMap, HashSet};

use super::objects::{Id, Kind, Objects};

/// Commits behind the named one that are looked at, which bounds memory and time.
const MOST_COMMITS: usize = 500_000;
/// Longest chain of tags.
const DEEPEST: u32 = 64;

/// What a reference's commit is to the named one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Age {
    /// The same, or one that it is made on.
    Old,
    /// None of these.
    Newer,
    /// Not found among so many of these that the others were not looked at.
    Unknown,
}

/// A commit whose parents come next, the latest first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    time: i64,
    parents: Vec<Id>,
}

/// What is known about the commits that one is made on.
struct Known {
    /// Itself, and those found behind it.
    old: HashSet<Id>,
    next: BinaryHeap<Next>,
    /// Some that are not behind it.
    newer: HashSet<Id>,
    most: usize,
}

/// What is known about the commits of all repositories.
pub(super) struct Ancestry {
    objects: Objects,
    /// What names in rules stand for, by repository.
    named: HashMap<(Vec<u8>, String), Option<Id>>,
    known: HashMap<(Vec<u8>, Id), Known>,
    most: usize,
}

impl Ancestry {
    /// Nothing yet of these objects.
    pub(super) fn new(objects: Objects) -> Self {
        Self {
            objects,
            named: HashMap::new(),
            known: HashMap::new(),
            most: MOST_COMMITS,
        }
    }

    #[cfg(test)]
    pub(super) fn with_most(mut self, most: usize) -> Self {
        self.most = most;
        self
    }

    /// The commit that a rule names, if the repository has it.
    pub(super) fn named(&mut self, repository: &[u8], hex: &str) -> Option<Id> {
        let key = (repository.to_vec(), hex.to_owned());
        if let Some(known) = self.named.get(&key) {
            return *known;
        }
        let id = Id::parse(hex.as_bytes());
        let commit = id.and_then(|id| self.peeled(repository, &id)).map(|c| c.0);
        self.named.insert(key, commit);
        commit
    }

    /// The commit that an id names, itself or through tags, and what it says.
    fn peeled(&mut self, repository: &[u8], id: &Id) -> Option<(Id, Next)> {
        let mut id = *id;
        for _ in 0..DEEPEST {
            match self.objects.object(repository, &id)? {
                (Kind::Commit, body) => return Some((id, next(&body))),
                (Kind::Tag, body) => id = target(&body)?,
            }
        }
        None
    }

    fn next(&mut self, repository: &[u8], id: &Id) -> Option<Next> {
        match self.objects.object(repository, id)? {
            (Kind::Commit, body) => Some(next(&body)),
            (Kind::Tag, _) => None,
        }
    }

    /// What a commit, or what a tag names, is to the commit `limit`. What cannot be read is newer.
    pub(super) fn age(&mut self, repository: &[u8], id: &Id, limit: &Id) -> Age {
        let key = (repository.to_vec(), *limit);
        let known = self.known.remove(&key);
        let mut known = match known {
            Some(known) => known,
            None => Known {
                old: HashSet::from([*limit]),
                next: self.next(repository, limit).into_iter().collect(),
                newer: HashSet::new(),
                most: self.most,
            },
        };
        let age = self.age_with(repository, id, &mut known, limit);
        self.known.insert(key, known);
        age
    }

    fn age_with(&mut self, repository: &[u8], id: &Id, known: &mut Known, limit: &Id) -> Age {
        if known.old.contains(id) {
            return Age::Old;
        }
        let Some((commit, first)) = self.peeled(repository, id) else {
            return Age::Newer;
        };
        // What is behind the commit: if the named one is there, the commit is not behind that.
        let mut seen = HashSet::from([commit]);
        let mut behind = BinaryHeap::from([first]);
        loop {
            if known.old.contains(&commit) {
                return Age::Old;
            }
            if known.newer.contains(&commit) {
                return Age::Newer;
            }
            if known.next.is_empty() {
                return Age::Newer;
            }
            if known.old.len() >= known.most {
                return Age::Unknown;
            }
            if let Some(next) = known.next.pop() {
                for parent in next.parents {
                    if known.old.insert(parent) {
                        known.next.extend(self.next(repository, &parent));
                    }
                }
            }
            if let Some(next) = behind.pop() {
                for parent in next.parents {
                    if parent == *limit || known.newer.contains(&parent) {
                        known.newer.insert(commit);
                        return Age::Newer;
                    }
                    // Behind an old one are only old ones.
                    if !known.old.contains(&parent) && seen.insert(parent) {
                        behind.extend(self.next(repository, &parent));
                    }
                }
            }
        }
    }
}

/// What a tag names.
fn target(tag: &[u8]) -> Option<Id> {
    let line = tag.split(|byte| *byte == b'\n').next()?;
    Id::parse(line.strip_prefix(b"object ")?)
}

/// What a commit is made on, and when it says that it was made.
fn next(commit: &[u8]) -> Next {
    let head = commit.split(|byte| *byte == b'\n');
    let mut parents = Vec::new();
    let mut time = 0;
    for line in head.take_while(|line| !line.is_empty()) {
        if let Some(parent) = line.strip_prefix(b"parent ") {
            parents.extend(Id::parse(parent));
        } else if let Some(who) = line.strip_prefix(b"committer ") {
            time = committed(who).unwrap_or_default();
        }
    }
    Next { time, parents }
}

/// The time after a committer's name, in seconds since 1970.
fn committed(who: &[u8]) -> Option<i64> {
    let end = who.iter().rposition(|byte| *byte == b'>')?;
    let rest = std::str::from_utf8(who.get(end + 1..)?).ok()?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::objects::{Files, ReadAt};
    use super::*;

    /// Loose objects in memory.
    #[derive(Default)]
    struct Loose(HashMap<Vec<u8>, Vec<u8>>);

    struct InMemory(Vec<u8>);

    impl ReadAt for InMemory {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
            let rest = &self.0[usize::try_from(offset).unwrap().min(self.0.len())..];
            let n = rest.len().min(buffer.len());
            buffer[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        }
    }

    impl Files for Loose {
        fn open(&self, path: &[u8]) -> Option<Arc<dyn ReadAt>> {
            Some(Arc::new(InMemory(self.0.get(path)?.clone())))
        }

        fn names(&self, _: &[u8]) -> Vec<Vec<u8>> {
            Vec::new()
        }
    }

    impl Loose {
        fn put(&mut self, kind: &str, body: &str, as_id: Option<&str>) -> String {
            use std::io::Write as _;

            use sha1::Digest as _;
            let whole = format!("{kind} {}\0{body}", body.len());
            let hash = sha1::Sha1::new().chain_update(&whole).finalize();
            let own: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            let id = as_id.unwrap_or(&own).to_owned();
            let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), Default::default());
            zlib.write_all(whole.as_bytes()).unwrap();
            let path = format!("r/.git/objects/{}/{}", &id[..2], &id[2..]);
            self.0.insert(path.into_bytes(), zlib.finish().unwrap());
            id
        }

        fn commit(&mut self, parents: &[&str], time: i64) -> String {
            self.put("commit", &body(parents, time), None)
        }
    }

    fn body(parents: &[&str], time: i64) -> String {
        let parents: String = parents.iter().map(|id| format!("parent {id}\n")).collect();
        format!(
            "tree {}\n{parents}author a <a@b> {time} +0000\ncommitter a <a@b> {time} +0000\n\nm\n",
            "0".repeat(40)
        )
    }

    fn ages(loose: Loose, most: usize, limit: &str, ids: &[&str]) -> Vec<Age> {
        let objects = Objects::new(vec![Box::new(loose)]);
        let mut ancestry = Ancestry::new(objects).with_most(most);
        let limit = ancestry.named(b"r/.git", limit).unwrap();
        ids.iter()
            .map(|id| ancestry.age(b"r/.git", &Id::parse(id.as_bytes()).unwrap(), &limit))
            .collect()
    }

    #[test]
    fn times_decide_nothing() {
        let mut git = Loose::default();
        let root = git.commit(&[], 1000);
        let side = git.commit(&[&root], 5000); // a clock that went wrong
        let named = git.commit(&[&root, &side], 2000);
        let answer = git.commit(&[&named], 1); // back-dated
        let on_it = git.commit(&[&answer, &root], 0);
        let beside = git.commit(&[&root], 1);
        let orphan = git.commit(&[], 1);
        let tag = git.put("tag", &format!("object {side}\ntype commit\n"), None);
        let tag_of_answer = git.put("tag", &format!("object {answer}\ntype commit\n"), None);
        let blob = git.put("blob", "x", None);
        let gone = "ab".repeat(20);
        let old = [&named, &root, &side, &tag];
        let new = [
            &answer,
            &on_it,
            &beside,
            &orphan,
            &tag_of_answer,
            &blob,
            &gone,
        ];
        for backwards in [false, true] {
            let mut ids: Vec<&str> = old.iter().chain(&new).map(|id| id.as_str()).collect();
            let mut wanted = vec![Age::Old; old.len()];
            wanted.resize(ids.len(), Age::Newer);
            if backwards {
                ids.reverse();
                wanted.reverse();
            }
            let copy = Loose(git.0.clone());
            assert_eq!(ages(copy, 100, &named, &ids), wanted);
        }
    }

    #[test]
    fn what_is_too_far_away_is_not_old() {
        let mut git = Loose::default();
        let mut ids = vec![git.commit(&[], 1)];
        for time in 2..50 {
            let parent = ids.last().unwrap().clone();
            ids.push(git.commit(&[&parent], time));
        }
        let orphan = git.commit(&[], 100);
        let above: Vec<String> = (0..30).fold(vec![ids[49 - 1].clone()], |mut ids, _| {
            let parent = ids.last().unwrap().clone();
            ids.push(git.commit(&[&parent], 1));
            ids
        });
        let asked = [
            ids[47].as_str(),
            ids[0].as_str(),
            orphan.as_str(),
            above[1].as_str(),
            above[30].as_str(),
        ];
        let got = ages(Loose(git.0.clone()), 1000, &ids[48], &asked);
        assert_eq!(
            got,
            [Age::Old, Age::Old, Age::Newer, Age::Newer, Age::Newer]
        );
        let got = ages(git, 20, &ids[48], &asked);
        assert_eq!(got[..3], [Age::Old, Age::Unknown, Age::Unknown]);
        assert!(got[3..].iter().all(|age| *age != Age::Old));
    }

    #[test]
    fn an_object_that_is_not_what_its_name_says_is_not_believed() {
        let mut git = Loose::default();
        let root = git.commit(&[], 10);
        let answer = git.commit(&[&root], 20);
        let named = git.commit(&[&root], 15);
        // The named commit, made to look as if the answer were behind it.
        git.put("commit", &body(&[&answer], 15), Some(&named));
        let objects = Objects::new(vec![Box::new(Loose(git.0.clone()))]);
        assert!(
            Ancestry::new(objects).named(b"r/.git", &named).is_none(),
            "nobody else has it"
        );
        // Another layer has it as it is.
        let mut below = Loose::default();
        below.put("commit", &body(&[&root], 15), None);
        let objects = Objects::new(vec![Box::new(git), Box::new(below)]);
        let mut ancestry = Ancestry::new(objects);
        let limit = ancestry.named(b"r/.git", &named).unwrap();
        let answer = Id::parse(answer.as_bytes()).unwrap();
        assert_eq!(ancestry.age(b"r/.git", &answer, &limit), Age::Newer);
    }
}
