//! `nibble fidelity`: the reference has no error, rounding to nearest has no variance, and more bits have less error.

use crate::{Place, read};
use serde_json::Value;

fn all<'a>(found: &'a Value, recipe: &str) -> &'a Value {
    let of = found["recipes"].as_array().unwrap().iter().find(|one| one["recipe"] == recipe);
    of.unwrap()["gradient"].as_array().unwrap().last().unwrap()
}

#[test]
fn errors_of_gradients_are_those_of_the_recipe() {
    let place = Place::with_text();
    place.train(&["--recipe", "bf16", "--set", "run.dir=run"]).ok();
    let args = "fidelity run --device cpu --redraws 3 --batches 2 --recipe bf16 --recipe mxfp8 --recipe ablation-mxfp4 --recipe nvfp4 --out found.json";
    place
        .nibble(&args.split(' ').collect::<Vec<_>>())
        .ok()
        .contains("reference bf16")
        .contains("ablation-mxfp4");
    let found: Value = serde_json::from_slice(&read(place.path("found.json"))).unwrap();
    let number = |recipe: &str, key: &str| all(&found, recipe)[key].as_f64().unwrap();
    assert_eq!([number("bf16", "bias"), number("bf16", "variance")], [0.0; 2]);
    assert_eq!([number("mxfp8", "variance"), number("ablation-mxfp4", "variance")], [0.0; 2]);
    // NVFP4 rounds gradients stochastically.
    assert!(number("nvfp4", "variance") > 0.0);
    assert!(0.0 < number("mxfp8", "bias") && number("mxfp8", "bias") < number("ablation-mxfp4", "bias"));
    assert!(found["noise"].as_array().unwrap().last().unwrap()["variance"].as_f64().unwrap() > 0.0);
    let args = "fidelity run --device cpu --redraws 1 --batches 2 --held-out 1 --recipe ablation-mxfp4 --recipe fp8-deepseek --alone fprop --alone dgrad --alone wgrad --out alone.json";
    let told = place.nibble(&args.split(' ').collect::<Vec<_>>()).ok();
    // The mixture has no dequantized rows to requantize.
    told.contains("not measured: recipe fp8-deepseek, wgrad alone");
    let found: Value = serde_json::from_slice(&read(place.path("alone.json"))).unwrap();
    let error = |recipe: &str| all(&found, recipe)["bias"].as_f64().unwrap();
    let [fprop, dgrad, wgrad] =
        ["fprop", "dgrad", "wgrad"].map(|gemm| error(&format!("ablation-mxfp4, {gemm} alone")));
    assert!(0.0 < wgrad && wgrad < dgrad.max(fprop) && dgrad != fprop, "{fprop} {dgrad} {wgrad}");
    assert!(error("ablation-mxfp4") < 2.0 * (fprop + dgrad + wgrad), "{fprop} {dgrad} {wgrad}");
    let loss = |recipe: &str| {
        let of = found["recipes"].as_array().unwrap().iter().find(|one| one["recipe"] == recipe).unwrap();
        of["held_out"]["mean"].as_f64().unwrap()
    };
    // Only the forward GEMM decides the loss.
    assert_eq!(loss("ablation-mxfp4, fprop alone"), loss("ablation-mxfp4"));
    assert_eq!(loss("ablation-mxfp4, wgrad alone"), 0.0);
    let args = "fidelity run --device cpu --redraws 1 --batches 2 --held-out 1 --recipe nvfp4 --recipe mxfp4-hopper --sites --out sites.json";
    place.nibble(&args.split(' ').collect::<Vec<_>>()).ok().contains("QSNR");
    let found: Value = serde_json::from_slice(&read(place.path("sites.json"))).unwrap();
    let sites = |recipe: usize| found["recipes"][recipe]["sites"].as_array().unwrap();
    let of = |site: &Value, key: &str| site[key].as_f64().unwrap();
    let mut transformed = 0;
    for site in sites(0) {
        // Other signs or another place of a transform's blocks would leave no signal; FP4 with a scale for 16 values has 15 to 25 dB.
        let qsnr = 10.0 * (of(site, "signal") / of(site, "noise")).log10();
        assert!(of(site, "values") == 0.0 || (14.0..26.0).contains(&qsnr), "{qsnr} dB: {site}");
        if of(site, "transform") == 0.0 {
            continue;
        }
        transformed += 1;
        // A Hadamard transform keeps the sum of squares.
        let is_same = |other: &&Value| {
            other["layer"] == site["layer"]
                && other["tensor"] == site["tensor"]
                && of(other, "transform") == 0.0
        };
        if let Some(plain) = sites(0).iter().find(is_same) {
            let ratio = of(site, "signal") / of(plain, "signal");
            assert!((ratio - 1.0).abs() < 1e-4, "{ratio}: {site}");
        }
    }
    assert!(transformed > 0);
    // An input is multiplied in one format and saved in another.
    let formats =
        |format: &str| sites(1).iter().any(|site| site["tensor"] == "x" && site["format"] == format);
    assert!(formats("e4m3") && formats("mxfp4"));
    let wrong = place.nibble(&["fidelity", "run", "--device", "cpu", "--recipe", "fp8-delayed"]).failed(2);
    assert!(wrong.contains("recipe fp8-delayed: has delayed scales"), "{wrong}");
}
