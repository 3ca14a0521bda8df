//! Paths of entries: bytes, `/`-separated, always within the root.

/// One step of a symbolic link's target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Component {
    /// Back to the root.
    Root,
    /// To the parent, or nowhere from the root.
    Up,
    /// Down into a name.
    Name(Vec<u8>),
}

impl Component {
    /// The steps of a link's target.
    pub(crate) fn parse(target: &[u8]) -> Vec<Self> {
        let root = target.starts_with(b"/").then_some(Self::Root);
        let steps = target
            .split(|&byte| byte == b'/')
            .filter_map(|name| match name {
                b"" | b"." => None,
                b".." => Some(Self::Up),
                name => Some(Self::Name(name.to_vec())),
            });
        root.into_iter().chain(steps).collect()
    }
}

/// The names of an entry's path. As text: `a/../b` is `b`, and `..` at the root stays there, as
/// container runtimes take the names in archives.
pub(crate) fn components(path: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names
}

/// True if `..` in the path would lead out of the root.
pub(crate) fn escapes(path: &[u8]) -> bool {
    let mut depth = 0usize;
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." if depth == 0 => return true,
            b".." => depth -= 1,
            _ => depth += 1,
        }
    }
    false
}

/// Symbolic links followed on the way along one path.
const MAX_FOLLOWED: usize = 255;

/// What a name on the way along a path is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step<S> {
    /// Something to go into.
    Into(S),
    /// A symbolic link with this target.
    Along(Vec<u8>),
}

/// Walks along `names`, through symbolic links that never lead out of the root; what was gone into is
/// on the way in the end. `step` says what the next name is, given the way so far, and whether a link
/// may still be followed: [`Step::Along`] is for no answer else.
pub(crate) fn walk<S, E>(
    names: &[&[u8]],
    mut step: impl FnMut(&[S], Vec<u8>, bool) -> Result<Step<S>, E>,
) -> Result<Vec<S>, E> {
    let mut way = Vec::new();
    // What is still to be walked, the next component last.
    let mut todo: Vec<Component> = names
        .iter()
        .rev()
        .map(|name| Component::Name(name.to_vec()))
        .collect();
    let mut followed = 0;
    while let Some(component) = todo.pop() {
        match component {
            Component::Up => {
                way.pop();
            }
            Component::Root => way.clear(),
            Component::Name(name) => match step(&way, name, followed < MAX_FOLLOWED)? {
                Step::Into(there) => way.push(there),
                Step::Along(target) => {
                    followed += 1;
                    todo.extend(Component::parse(&target).into_iter().rev());
                }
            },
        }
    }
    Ok(way)
}

/// `dir` and a name in it.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        return name.to_vec();
    }
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    path.push(b'/');
    path.extend_from_slice(name);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_within_the_root() {
        let names = |path: &str| components(path.as_bytes()).join(&b'/');
        assert_eq!(names("./a//b/./c/"), b"a/b/c");
        assert_eq!(names("/abs"), b"abs");
        assert_eq!(names("../../etc/passwd"), b"etc/passwd");
        assert_eq!(names("a/b/../../../c"), b"c");
        assert_eq!(names("./"), b"");
        assert_eq!(names("..a/...b"), b"..a/...b");
        assert!(escapes(b"a/../../b"));
        assert!(escapes(b"/.."));
        assert!(!escapes(b"a/../b"));
    }

    #[test]
    fn links_are_followed_within_the_root() {
        let walked = |path: &str| {
            let names: Vec<&[u8]> = path.split('/').map(str::as_bytes).collect();
            let way = walk(&names, |way: &[Vec<u8>], name, may| {
                Ok(match name.as_slice() {
                    b"abs" => Step::Along(b"/x/y".to_vec()),
                    b"out" => Step::Along(b"../../../z".to_vec()),
                    b"loop" if may => Step::Along(b"loop".to_vec()),
                    b"loop" => return Err(way.len()),
                    _ => Step::Into(name),
                })
            });
            way.map(|way| way.join(&b'/'))
        };
        assert_eq!(walked("a/b"), Ok(b"a/b".to_vec()));
        assert_eq!(walked("a/abs/c"), Ok(b"x/y/c".to_vec()));
        assert_eq!(walked("a/b/out/c"), Ok(b"z/c".to_vec()));
        assert_eq!(walked("a/loop/c"), Err(1));
    }
}
