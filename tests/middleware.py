"""The strictest Content-Security-Policy that a site may have for its admin."""


def strict_policy(get_response):
    def respond(request):
        response = get_response(request)
        if request.path.startswith("/admin/"):
            response["Content-Security-Policy"] = (
                "default-src 'self'; frame-ancestors 'none'; form-action 'self'"
            )
        return response

    return respond
