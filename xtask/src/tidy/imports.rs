//! Which crate of the workspace may import which. A new arrow is a change of design.

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Crate, what its product code may import, and what its tests may import besides.
type Row = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

/// The fuzz targets are tests, so they may use the fixtures as a product may not. Tests may use the fixtures.
const TABLE: [Row; 10] = [
    ("layerpack-erofs", &[], &["layerpack-fixtures"]),
    ("layerpack-store", &[], &["layerpack-fixtures"]),
    ("layerpack-sys", &[], &["layerpack-fixtures"]),
    (
        "layerpack-packer",
        &["layerpack-erofs", "layerpack-store", "layerpack-sys"],
        &["layerpack-fixtures"],
    ),
    (
        "layerpack-layerfs",
        &["layerpack-erofs", "layerpack-store", "layerpack-sys"],
        &["layerpack-fixtures"],
    ),
    (
        "layerpack-runtime",
        &["layerpack-store", "layerpack-sys"],
        &["layerpack-fixtures"],
    ),
    (
        "layerpack",
        &[
            "layerpack-erofs",
            "layerpack-store",
            "layerpack-sys",
            "layerpack-packer",
            "layerpack-layerfs",
            "layerpack-runtime",
        ],
        &["layerpack-fixtures"],
    ),
    (
        "layerpack-fuzz",
        &[
            "layerpack-erofs",
            "layerpack-store",
            "layerpack-packer",
            "layerpack-fixtures",
        ],
        &[],
    ),
    ("layerpack-fixtures", &[], &[]),
    ("xtask", &["layerpack-fixtures"], &[]),
];

/// Breaches in what `cargo metadata` printed.
pub(super) fn check(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata.pointer("/packages").and_then(Value::as_array);
    let packages = packages.context("cargo metadata lists no packages")?;
    let names: Vec<&str> = packages
        .iter()
        .filter_map(|package| package.pointer("/name")?.as_str())
        .collect();
    let mut breaches = Vec::new();
    for package in packages {
        let name = package
            .pointer("/name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let Some((_, product, tests)) = TABLE.iter().find(|row| row.0 == name) else {
            breaches.push(format!("{name}: not in tidy's import table"));
            continue;
        };
        let dependencies = package.pointer("/dependencies").and_then(Value::as_array);
        for dependency in dependencies.into_iter().flatten() {
            let target = dependency
                .pointer("/name")
                .and_then(Value::as_str)
                .unwrap_or_default();
            if !names.contains(&target) {
                continue;
            }
            let kind = dependency.pointer("/kind").and_then(Value::as_str);
            let allowed =
                product.contains(&target) || (kind == Some("dev") && tests.contains(&target));
            if !allowed {
                let kind = kind.unwrap_or("normal");
                breaches.push(format!(
                    "{name}: may not import {target} ({kind} dependency)"
                ));
            }
        }
    }
    Ok(breaches)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn packages(importer: &str, imported: &str, kind: Option<&str>) -> Value {
        json!({"packages": [
            {"name": importer, "dependencies": [
                {"name": imported, "kind": kind}, {"name": "serde", "kind": null}]},
            {"name": imported, "dependencies": []},
        ]})
    }

    #[test]
    fn arrows_of_the_table_pass_and_others_do_not() {
        let of = |a, b, kind| check(&packages(a, b, kind)).unwrap();
        let none = Vec::<String>::new();
        assert_eq!(of("layerpack-packer", "layerpack-erofs", None), none);
        assert_eq!(
            of("layerpack-packer", "layerpack-fixtures", Some("dev")),
            none
        );
        assert_eq!(of("layerpack-packer", "layerpack-layerfs", None).len(), 1);
        assert_eq!(
            of("layerpack-packer", "layerpack-layerfs", Some("dev")).len(),
            1
        );
        assert_eq!(of("layerpack-packer", "layerpack-fixtures", None).len(), 1);
        assert_eq!(
            of("layerpack-erofs", "layerpack-store", Some("build")).len(),
            1
        );
        assert_eq!(of("layerpack-new", "layerpack-erofs", None).len(), 1);
    }
}
