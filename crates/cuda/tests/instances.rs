//! The README's table of kernel instances is the code's. To write it again: `NIBBLE_UPDATE=1 cargo test --test instances`.

use nibble_cuda::jit::TemplateArg;
use std::collections::BTreeMap;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
const BEGIN: &str = "<!-- instances -->\n";
const END: &str = "<!-- end of instances -->";

fn value(arg: &TemplateArg) -> String {
    match arg {
        TemplateArg::Int(n) => n.to_string(),
        TemplateArg::Bool(b) => b.to_string(),
        TemplateArg::Type(name) => name.replace("nib::", ""),
    }
}

/// A row a kernel: its file, the names of its template's parameters, and their values in each instance.
fn table() -> String {
    let mut kernels: BTreeMap<(&str, &str), (String, Vec<String>)> = BTreeMap::new();
    for instance in nibble_cuda::ops::instances() {
        let spec = instance.spec;
        let names: Vec<&str> = spec.args.iter().map(|(name, _)| *name).collect();
        let values: Vec<String> = spec.args.iter().map(|(_, arg)| value(arg)).collect();
        let (_, instances) =
            kernels.entry((spec.source, spec.name)).or_insert_with(|| (names.join(", "), Vec::new()));
        instances.push(values.join(" "));
    }
    let mut table = String::from("| kernel | file | parameters | instances |\n| --- | --- | --- | --- |\n");
    for ((source, name), (parameters, instances)) in kernels {
        let (name, file) = (name.trim_start_matches("nib::"), source.trim_start_matches("kernels/"));
        let instances = instances.join(" · ");
        table.push_str(&format!("| `{name}` | `{file}` | {parameters} | {instances} |\n"));
    }
    table
}

#[test]
fn the_readme_names_every_instance() {
    let readme = std::fs::read_to_string(README).unwrap();
    let (before, rest) = readme.split_once(BEGIN).expect("the table's first mark");
    let (written, after) = rest.split_once(END).expect("the table's last mark");
    let table = table();
    if nibble_cuda::env::update() {
        std::fs::write(README, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
    } else {
        assert_eq!(written, table, "instances changed: NIBBLE_UPDATE=1 writes the table again");
    }
}
