//! Specs beside types: every structure of a byte format is named in its crate's spec, and its size
//! is held by an assertion.
//!
//! A structure of a format is one that is `repr(C)` in a crate that owns a `FORMAT.md`. Its name
//! must stand in that file in backticks, so that whoever changes the type finds the text, and a
//! `const` assertion on its `size_of` must stand in the same source file, so that the compiler
//! finds whoever changes it by accident.

/// Crates that own formats or promises, and the file that says what they are.
const SPECS: [(&str, &str); 4] = [
    ("crates/erofs", "FORMAT.md"),
    ("crates/store", "FORMAT.md"),
    ("crates/layerfs", "SEMANTICS.md"),
    ("crates/runtime", "THREATS.md"),
];

/// Breaches in all files of the repository, given as name and content.
pub(super) fn check(files: &[(String, String)]) -> Vec<String> {
    let mut breaches = Vec::new();
    for (folder, spec) in SPECS {
        let path = format!("{folder}/{spec}");
        let Some((_, text)) = files.iter().find(|(name, _)| *name == path) else {
            breaches.push(format!("{path}: missing"));
            continue;
        };
        if spec != "FORMAT.md" {
            continue;
        }
        let sources = format!("{folder}/src/");
        for (name, content) in files.iter().filter(|(name, _)| name.starts_with(&sources)) {
            for structure in structures(content) {
                if !text.contains(&format!("`{structure}`")) {
                    breaches.push(format!("{name}: {structure} is not described in {path}"));
                }
                if !content.contains(&format!("size_of::<{structure}>() ==")) {
                    breaches.push(format!("{name}: the size of {structure} is not asserted"));
                }
            }
        }
    }
    breaches
}

/// Names of the `repr(C)` structures in a source file.
fn structures(content: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut wanted = false;
    for line in content.lines() {
        let line = line.trim();
        wanted |= line.starts_with(concat!("#[re", "pr(C"));
        if let Some((_, rest)) = line.split_once("struct ")
            && wanted
        {
            wanted = false;
            let end = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            found.extend(rest.get(..end));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(spec: &str, source: &str) -> Vec<(String, String)> {
        let mut files: Vec<(String, String)> = SPECS
            .iter()
            .map(|(folder, name)| (format!("{folder}/{name}"), String::new()))
            .collect();
        files[1].1 = spec.to_owned();
        files.push(("crates/store/src/pack.rs".to_owned(), source.to_owned()));
        files
    }

    const SOURCE: &str = concat!(
        "#[re",
        "pr(C)]\n#[derive(Clone)]\npub(crate) struct Footer {\n}\n",
        "const _: () = assert!(size_of::<Footer>() == 64);\nstruct Other;\n"
    );

    #[test]
    fn a_described_and_asserted_structure_passes() {
        assert_eq!(
            check(&files("The `Footer` has 64 bytes.", SOURCE)),
            Vec::<String>::new()
        );
    }

    #[test]
    fn undescribed_unasserted_and_missing_are_found() {
        assert_eq!(check(&files("", SOURCE)).len(), 1);
        let unasserted = SOURCE.replace("size_of", "align_of");
        assert_eq!(check(&files("`Footer`", &unasserted)).len(), 1);
        assert_eq!(check(&[]).len(), 4);
    }
}
